"""A kubelet whose containers are plain processes of this machine; a program of its own."""
