"""Explain the state of a job on Kubernetes: its status, the reason, and what to do next.

No I/O, in three steps. `facts` holds what the API returned, every other module finds a
`causes.Cause` in it, and `causes.describe` turns it into a sentence. The modules recognize what
kinetic's own Jobs, JobSets and LeaderWorkerSets can run into. They quote anything else, with one
piece of advice for each reason. May import the values.
"""
