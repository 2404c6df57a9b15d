"""The entry of each error code: what you see, why, and what to do.

``kinetic explain`` prints these entries, and a test compares docs/troubleshooting.md with them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """Explain one code. ``message`` is what you see; ``…`` stands for names and figures."""

    code: str
    title: str
    message: str
    cause: str
    fix: str


GROUPS = {
    "KN0": "There is no error",
    "KN1": "A setting is wrong",
    "KN2": "The job can't be submitted",
    "KN3": "The job has no value",
    "KN4": "A request fails",
    "KN5": "A check inside kinetic fails",
}
"""The titles of the groups of codes, by the beginning that the codes of a group share."""

ENTRIES = (
    Entry(
        "KN001",
        "The job stays PENDING",
        "PENDING",
        "The job waits for a slot, a node, an image, or its turn in a queue.",
        "Call `job.reason()`, or `kinetic jobs status ID`: it names the cause and the next "
        "step. To limit the wait, pass `start_timeout=` in seconds.",
    ),
    Entry(
        "KN002",
        "The job doesn't find a module",
        "ModuleNotFoundError: No module named '…'",
        "The package isn't in the dependency file that kinetic reads. A module of your own "
        "lies outside the project, or is left out of it.",
        "Add the package to requirements.txt or pyproject.toml. Move the module below the "
        "project's root, or set KINETIC_PACKAGE_ROOT.",
    ),
    Entry(
        "KN003",
        "The job runs on the CPU",
        "becomes this machine's own processors",
        'This machine, with `backend="local"`, has no such accelerator.',
        'Configure a cluster, or pass `accelerator="cpu"` to silence the warning.',
    ),
    Entry(
        "KN100",
        "kinetic failed",
        "KineticError: …",
        "This class is the base of all errors of kinetic. An error has it alone if no other "
        "class fits.",
        "Read the message. If you catch KineticError, look at the error's class and its `code`.",
    ),
    Entry(
        "KN101",
        "A setting or an argument is wrong",
        "there is no accelerator …",
        "An option, a KINETIC_* variable, or a value in the profile isn't valid. kinetic sent"
        " nothing.",
        "Change the value that the message names. `kinetic config show` lists each setting "
        "and where its value comes from.",
    ),
    Entry(
        "KN102",
        "The profiles can't be used",
        "there is no profile …",
        "The profile doesn't exist, or the file of profiles is damaged or can't be read.",
        "`kinetic profile ls` lists the profiles, and `kinetic profile create NAME` makes "
        "one. Unset KINETIC_PROFILE if you didn't set it on purpose.",
    ),
    Entry(
        "KN201",
        "An input can't be submitted",
        "the input does not fit …",
        "The input of this item isn't valid for the function's parameters, or can't be pickled.",
        "Correct the input and submit it in a new batch. `input_mode=` decides how an input "
        "becomes arguments.",
    ),
    Entry(
        "KN202",
        "The function, an argument, or the project can't be shipped",
        "cannot be shipped: pass the data to create it, and create it in the function.",
        "An argument or a captured variable can't be pickled, such as an open file or a lock."
        " Or a file of the project can't be read, or a dependency exists on this machine "
        "only.",
        "Create such objects in the function. Exclude files with .kineticignore. The error's "
        "`culprit` names the value or the file.",
    ),
    Entry(
        "KN203",
        "A Data can't be shipped",
        "Data needs a path: it was given an empty one",
        "The path or the address of a `Data` doesn't exist, can't be read, or isn't valid.",
        "Correct the path. A folder of a bucket ends in a slash: `gs://bucket/folder/`.",
    ),
    Entry(
        "KN204",
        "The image can't be built",
        "Cloud Build of project … refused the build",
        "A package in the dependency file can't be installed, packages need different "
        "versions of JAX, or the project lacks what a build needs.",
        "Read the last lines of the log in the message; `log_url` has the whole log. "
        "Correct the dependency file, or grant the roles that the message names.",
    ),
    Entry(
        "KN205",
        "The platform refused the job",
        "was refused: …",
        "A policy of the cluster or a missing resource type refuses the job: an admission "
        "webhook, Pod Security, or no LeaderWorkerSet. On this machine, the supervisor "
        "refused it.",
        "Change what the message names, or ask the cluster's administrator. `kinetic doctor` "
        "checks what jobs need.",
    ),
    Entry(
        "KN301",
        "The job has no value",
        "has ended, and its debugger with it",
        "You asked for something that only a running or successful job has.",
        "See `job.status()` and `job.reason()`, and submit the job again.",
    ),
    Entry(
        "KN302",
        "The job's exception or value can't be rebuilt here",
        "failed (…): …",
        "The function raised an exception whose class this process can't import. Or the job's"
        " value needs a package or a Python version that this process lacks.",
        "Read the remote traceback below the message. Install the package here, or return "
        "plain data.",
    ),
    Entry(
        "KN303",
        "The job's process died",
        "ended without an outcome (lost): …",
        "The process was killed, or called os._exit, or crashed in native code.",
        "Read the end of the log with `job.tail()`. Pass `retries=` to a batch to run such "
        "items again.",
    ),
    Entry(
        "KN304",
        "The job was cancelled",
        "was cancelled",
        "Someone called `cancel()`, pressed Ctrl-C during a plain call, or deleted the job. A"
        " batch cancels items by `fail_fast`, `budget`, or `batch_timeout`.",
        "Submit it again if you didn't intend that. `batch.reason()` says what ended a batch.",
    ),
    Entry(
        "KN305",
        "The rest of a batch isn't submitted",
        "is not submitted any more",
        "The process that submitted the batch has ended, or another process took the batch over.",
        "`kinetic batches resume ID` or `kinetic.attach_batch(ID).resume()` continues the "
        "batch. Items that succeeded don't run again.",
    ),
    Entry(
        "KN306",
        "The inputs of a batch are incomplete",
        "the process that had the others is gone",
        "The process that produced the inputs from an iterator ended before the iterator did.",
        "Call `resume(inputs=...)` with the inputs from the number in the message on, or "
        "`resume(seal=True)` if there are none.",
    ),
    Entry(
        "KN307",
        "A wait took longer than its timeout",
        "has no result after … s; it goes on, and its handle stays valid",
        "The `timeout=` of `result()`, `wait()`, or a similar call passed. The job still runs.",
        "Wait again, or cancel the job. To limit the job, not the wait, use `timeout=` of "
        "`kinetic.run`.",
    ),
    Entry(
        "KN308",
        "Items of a batch failed",
        "jobs failed",
        "At least one item has no value. The message has the first failure.",
        "`partial_results` of the error has the values, `outcomes()` yields each item's "
        "outcome, and `retry_failed()` runs the failed items again.",
    ),
    Entry(
        "KN311",
        "The job failed before your function began",
        "failed (setup): …",
        "Its dependencies can't be installed, its Data can't be read, or its Python differs "
        "from yours. Or it lacks a module that the function needs when kinetic loads it.",
        "Read the message. Use an image with the same minor version of Python, and list all "
        "packages in the dependency file.",
    ),
    Entry(
        "KN312",
        "The job ran out of memory",
        "out of memory",
        "The job exceeded its memory limit, or the machine had no memory left.",
        'Pass a larger `memory=`, such as `"16Gi"`, or use less. On this machine, set '
        "KINETIC_LOCAL_SLOTS to run fewer jobs at once.",
    ),
    Entry(
        "KN313",
        "The job exceeded its timeout",
        "ran longer than its timeout of … s",
        "The function ran longer than `timeout=` of `kinetic.run` allows.",
        "Raise `timeout=`, or save checkpoints and retry.",
    ),
    Entry(
        "KN314",
        "The machine of the job was taken away",
        "ended without an outcome (node lost): …",
        "The node was preempted, drained, or lost, more often than kinetic replaces it: three"
        " times.",
        "Submit it again. Save checkpoints to KINETIC_OUTPUT_PATH, and don't use spot "
        "machines for long jobs on several hosts.",
    ),
    Entry(
        "KN315",
        "The image can't be pulled",
        "correct the image's name, let the nodes read it, or check its registry",
        "The image doesn't exist, or the nodes may not read its registry.",
        "Check the name in `container_image=`. Give the nodes' service account "
        "`roles/artifactregistry.reader`.",
    ),
    Entry(
        "KN316",
        "No node fits the job",
        "no node pool could hold this pod, so it can never start as requested",
        "No node pool has this accelerator, or as much CPU or memory as the job asks for. Or the "
        "cluster has no node.",
        "Ask for what a pool has, or add nodes. On GKE: `kinetic pool add --accelerator NAME`.",
    ),
    Entry(
        "KN317",
        "A quota is used up",
        "request less, or have the quota raised",
        "The namespace, the queue, or the Google Cloud project allows no more.",
        "Wait until other jobs end, ask for less, or have the quota raised.",
    ),
    Entry(
        "KN318",
        "The job ran out of disk",
        "write less, write to a bucket, or raise that limit",
        "The job wrote more to the pod's disk than it may.",
        "Write to a bucket, or mount large inputs with `Data(..., fuse=True)`.",
    ),
    Entry(
        "KN401",
        "The store or the platform answered with an error",
        "the answer … isn't one of a Kubernetes API server",
        "A server or the file system did something unexpected. A proxy may answer in the "
        "server's name.",
        "Read the message, which quotes the answer. Run `kinetic doctor`.",
    ),
    Entry(
        "KN402",
        "The client is closed",
        "was closed meanwhile; open another",
        "The program used a client, or a handle of one, after its `async with` block, or in a"
        " forked process.",
        "Keep the client open while you use its handles. In another process, open a client "
        "and `attach`.",
    ),
    Entry(
        "KN403",
        "You lack a permission, or aren't logged in",
        "there are no application-default credentials",
        "There are no credentials, they have expired, or their account lacks a role.",
        "Run `gcloud auth application-default login`, or grant the role that the message "
        "names. `kinetic doctor` shows what is missing.",
    ),
    Entry(
        "KN404",
        "There is no such job, batch, or object",
        "it was cleaned up, or belongs to another project, cluster or KINETIC_HOME",
        "The ID is wrong, the job was cleaned up, or your settings name another place than "
        "the one that has it.",
        "`kinetic jobs list` and `kinetic batches list` show what exists. Compare `kinetic "
        "config show` with the settings that submitted the job.",
    ),
    Entry(
        "KN405",
        "The job has no log",
        "has no log: it has not started yet, or its job was removed",
        "The job hasn't started, or its pod and its log were removed: by `result()`, "
        "`cancel()`, or `cleanup()`.",
        "Wait until the job runs. To keep the log, call `result(cleanup=False)`.",
    ),
    Entry(
        "KN406",
        "Another process changed it first",
        "another process changed it first",
        "Two processes changed the same object or submit the same batch.",
        "Let one process submit the batch. `resume(force=True)` takes it from the other one.",
    ),
    Entry(
        "KN407",
        "The object exists already",
        "choose another name, or remove it",
        "Another object of the cluster has this name.",
        "Choose another name, or remove the object.",
    ),
    Entry(
        "KN408",
        "The platform refuses a request",
        "correct that, and run the command again",
        "The server understood the request and doesn't allow it: a policy, a quota, or a "
        "value that isn't valid.",
        "Change what the message quotes, and run the command again.",
    ),
    Entry(
        "KN409",
        "The version to continue from is too old",
        "list again",
        "The API server no longer has the version that a watch continues from. kinetic lists "
        "again by itself.",
        "Repeat the call if you see this error.",
    ),
    Entry(
        "KN410",
        "The store is full",
        "free some space, or set KINETIC_STORE to another disk",
        "The disk with the store has no room.",
        "Run `kinetic gc`, clean up old jobs, or set KINETIC_STORE to a directory with more room.",
    ),
    Entry(
        "KN411",
        "Too many requests",
        "too many requests for …",
        "The server limits your requests. kinetic has already retried with pauses.",
        "Try again later. Use a smaller `max_concurrent`.",
    ),
    Entry(
        "KN412",
        "The store or the platform doesn't answer",
        "does not answer as it should",
        "The network, the API server, the bucket, or the local supervisor doesn't respond.",
        "Check the network and run `kinetic doctor`. Jobs go on; wait for them again later. "
        "On this machine, `kinetic local status` shows the supervisor.",
    ),
    Entry(
        "KN501",
        "Stored data isn't what was signed",
        "nothing of it was used",
        "An object in the store was changed, damaged, or written by another version of "
        "kinetic. Signatures don't match if KINETIC_HOME or the namespace differs from the "
        "submitter's.",
        "Use the settings and the version that submitted the job. Check who can write to the "
        "store, and submit again.",
    ),
    Entry(
        "KN502",
        "The sync API and the async API are mixed",
        "kinetic.aio runs on asyncio, and no loop of asyncio runs here",
        "Code calls `kinetic.aio` without a running asyncio loop, or the sync API inside "
        "kinetic's own loop.",
        "In a coroutine, use `kinetic.aio` and await it. Elsewhere, use the sync API.",
    ),
)

BY_CODE = {entry.code: entry for entry in ENTRIES}
"""The entries by their code."""
