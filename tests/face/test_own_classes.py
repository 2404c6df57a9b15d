"""Values of a script's classes are instances of its classes in each of its processes and jobs."""

from __future__ import annotations

PROGRAM = """
import dataclasses, enum, typing

@dataclasses.dataclass
class Point:
    x: float
    seen: list = dataclasses.field(default_factory=list)

    @property
    def double(self):
        return 2 * self.x

class Far(Point):
    def __init__(self, x, filler=b""):
        super().__init__(x)
        self.filler = filler

class State(enum.Enum):
    DONE = 1

class Pair(typing.NamedTuple):
    first: int
    second: int

class Outer:
    @dataclasses.dataclass(frozen=True, slots=True)
    class Inner:
        x: int

@remote
def make(size):
    return Point(1.0), Far(2.0, b"x" * size), State.DONE, Pair(1, 2), Outer.Inner(3)

def describe(point, far, state, pair, inner):
    same = point == Point(1.0), state is State.DONE, inner == Outer.Inner(3)
    return *same, type(far) is Far, isinstance(far, Point), type(pair) is Pair, point.double
"""
SUBMIT = """
batch = make.run_async_map([0, 300_000])
batch.wait()
make.run_async(0).save_result("value")
print(batch.group_id)
"""
READ = """
batch = kinetic.attach_batch({group!r})
value = kinetic.jobs.load_result("value")
for read in [*batch.results(cleanup=False), value]:
    print(describe(*read))
"""
PASS = """
@remote
def told(value):
    return describe(*value)

print(told(value))
"""


def test_another_process_of_the_script_gets_instances_of_its_classes(script) -> None:
    """So do its jobs. Of a class that has changed since, the values keep the old one."""
    with script(PROGRAM + SUBMIT) as program:
        group = program.line()
    shown = "(True, True, True, True, True, True, 2.0)"
    script(PROGRAM + READ.format(group=group) + PASS).prints(*[shown] * 4)
    changed = "\n" + PROGRAM.replace("2 * self.x", "3 * self.x")
    shown = "(False, True, True, False, False, True, 2.0)"
    script(changed + READ.format(group=group)).prints(*[shown] * 3)


GROWING = """
@dataclasses.dataclass
class Order:
    number: int
    kinds: frozenset = frozenset()

    def is_known(self):
        return self.number in {1, 2, 3} or not self.kinds.isdisjoint({"a", "b", "c", "d"})

@remote
def check(order, state):
    return type(order) is Order, order == Order(order.number), state is State.DONE, order.is_known()

def lazily():
    yield Order(1), State.DONE
    threading.Event().wait()
"""


def test_inputs_of_another_process_of_the_script_have_the_functions_classes(script) -> None:
    submit = """
batch = check.run_async_map(lazily())
print(batch.group_id, batch.job(0).result())
"""
    own = "(True, True, True, True)"
    with script(PROGRAM + GROWING + submit) as program:
        group, _, shown = program.line().partition(" ")
        assert shown == own
        program.kill()
    resume = f"""
batch = kinetic.attach_batch({group!r})
batch.resume(inputs=[(Order(2), State.DONE), (Order(9), State.DONE)])
print(*batch.results(), sep="\\n")
"""
    # The lines of the script have moved, but its classes are the same.
    script("\n\n" + PROGRAM + GROWING + resume).prints(own, own, "(True, True, True, False)")
