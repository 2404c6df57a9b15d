# pyright: strict, reportUnusedCoroutine=false
"""Code with type errors: the type checkers must report each marked line and no other."""

from __future__ import annotations

import kinetic
import kinetic.aio
from kinetic import Failed, Succeeded


@kinetic.run(accelerator="cpu")
def train(rate: float, *, epochs: int = 3) -> list[float]:
    return [rate] * epochs


@kinetic.run
async def fetch(url: str) -> bytes:
    return url.encode()


class Model:
    @kinetic.run(cpu=2)
    def fit(self, steps: int) -> float:
        return steps / 2


def wrong_arguments(model: Model) -> None:
    train("fast")  # error
    train()  # error
    train(0.1, 3)  # error
    train(0.1, epoch=3)  # error
    train(kinetic.Data("words"))  # error
    kinetic.Data(3)  # error
    train.run_async("fast")  # error
    train.run_async(0.1, retries=3)  # error
    train.local("fast")  # error
    model.fit("many")  # error
    model.fit.run_async()  # error
    fetch(3)  # error
    fetch.run_async(3)  # error


def wrong_results() -> None:
    number: float = train(0.1)  # error
    text: str = train.run_async(0.1).result()  # error
    body: bytes = fetch("u")  # error
    awaited: str = fetch.run_async("u").result()  # error
    print(number, text, body, awaited)


def wrong_settings() -> None:
    train.options(acelerator="cpu")  # error
    train.options(spot="yes")  # error
    kinetic.run(accelerator=3)  # error
    kinetic.run(isolation="thread")  # error
    kinetic.run(init={"model": 3})  # error
    train.options(init={"rate": 0.1})  # error
    train.options(recycle="all")  # error
    kinetic.run(volumes={"/data": "./data"})  # error
    kinetic.run(capture_env_vars="HOME")  # error
    nothing = (None,) * 9
    kinetic.run("cpu", *nothing, False, None, False, 9)  # error
    train.run_async_map([0.1], max_concurent=3)  # error
    train.run_async_map(3)  # error


def wrong_outcomes() -> None:
    batch = train.run_async_map([0.1], progress="yes")  # error
    for index, given, outcome in train.run_async_map([0.1]).outcomes():
        rate: str = given  # error
        print(rate)
        text: str = outcome.unwrap()  # error
        number: float = outcome.value  # error
        print(index + "1", text, number)  # error
        match outcome:
            case Failed(error):
                print(error + 1)  # error
            case Succeeded(value):
                print(value + 1)  # error
            case _:
                pass
    train.sweep(3, trials=1)  # error
    batch.outcomes(order=True)  # error
    batch.retry_failed("all")  # error
    batch.resume([0.2])  # error
    numbers: list[int] = train.run_async_map([0.1]).results()  # error
    print(numbers)


async def wrong_submissions() -> None:
    await kinetic.submit(train, "fast")  # error
    await kinetic.aio.run(fetch, 3)  # error
    text: str = await kinetic.submit(train, 0.1)  # error
    print(text)
