"""Explain the state of a job on Kubernetes: its status, the reason, and what to do next.

These modules do no I/O, and may import the values and `manifests`. `facts` holds what the API
returned. `judge` finds a `causes.Cause` in these facts, with a module for each kind of cause, and
`causes.Diagnosis` turns the cause into sentences. The modules recognize the problems of Jobs,
JobSets, and LeaderWorkerSets that kinetic made. They quote all other messages, with one piece of
advice for each reason.
"""
