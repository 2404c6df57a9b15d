"""Fork jobs from a process that has imported what they need. It may import all but `pod`."""
