"""Say what Kubernetes knows of a job: its status, the reason, and what to do next.

Pure, in three steps. `facts` holds what the API returned, every other module finds a
`causes.Cause` in it, and `causes.tell` words it once. Covered is what kinetic's own Jobs,
JobSets and LeaderWorkerSets can meet; anything else is quoted, with one piece of advice for
each reason. May import the values.
"""
