"""Fork jobs from a process that has imported what they need. May import all but `pod`."""
