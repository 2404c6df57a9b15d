"""What Kubernetes says of a job, in the words of its user: status, reason and what to do.

Pure: JSON as the API returns it goes in, a `Diagnosis` comes out. May import the values.
"""
