"""Name what to call where a program takes a batch for a list of its results, or pickles it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn


class NoSequence:
    """A base class of batches, whose operators for sequences raise an error that names a method.

    Type checkers don't see the operators, so they report such a mistake before the program runs.
    """

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a batch's handle can't be copied or pickled: pass its group_id to the other process, "
            "and call kinetic.attach_batch(group_id) there"
        )

    if not TYPE_CHECKING:

        def __bool__(self) -> bool:
            return True  # otherwise, Python calls `__len__`

        def __iter__(self) -> NoReturn:
            raise TypeError(
                "a batch is not iterable: loop over batch.outcomes() or batch.as_completed(), or "
                "call batch.results()"
            )

        def __aiter__(self) -> NoReturn:
            self.__iter__()

        def __len__(self) -> NoReturn:
            raise TypeError(
                "a batch has no len(), because its inputs may be endless: call "
                "len(batch.jobs), or read batch.progress()"
            )

        def __getitem__(self, index: object) -> NoReturn:
            raise TypeError(
                f"a batch has no [{index!r}]: batch.job(index) is the handle of an "
                "item, and batch.results() a list of all values"
            )
