"""Test which settings the decorator accepts, and its errors about others."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kinetic
from kinetic.errors import ConfigurationError
from kinetic.options import Options, settings_of

DATA = kinetic.Data("gs://bucket/data/")


def plain(number: int) -> int:
    return number


def test_the_defaults_are_documented_values() -> None:
    options = Options()
    assert options.accelerator == "tpu-v5e-1"
    assert (options.spot, options.debug, options.isolation) == (False, False, "process")
    rest = {name: getattr(options, name) for name in inspect.signature(Options).parameters}
    assert {name for name, value in rest.items() if value is not None} == {
        "accelerator",
        "spot",
        "debug",
        "isolation",
    }


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (None, None),
        (1 << 30, 1 << 30),
        ("512Mi", 512 << 20),
        ("4Gi", 4 << 30),
        ("4GiB", 4 << 30),
        ("1.5Gi", 3 << 29),
        (" 2 G ", 2_000_000_000),
        ("2GB", 2_000_000_000),
        ("2000000K", 2_000_000_000),
        ("2000000k", 2_000_000_000),
        ("1Ti", 1 << 40),
        ("268435456", 1 << 28),
    ],
)
def test_memory_is_a_kubernetes_quantity_or_bytes(memory: Any, expected: int | None) -> None:
    assert Options(memory=memory).memory_bytes == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"accelerator": "tpu-v6e-7"}, "v6e"),
        ({"accelerator": 3}, "accelerator"),
        ({"accelerator": ""}, "accelerator"),
        ({"backend": "gek"}, "did you mean 'gke'"),
        ({"backend": ""}, "backend must be text that"),
        ({"zone": ""}, "zone must be text that"),
        ({"project": "  "}, "project must be text that"),
        ({"container_image": 3}, "container_image must be text that isn't empty, or None, not 3"),
        ({"container_image": "bundeld"}, "resembles 'bundled'"),
        ({"container_image": "Prebuilt"}, "resembles 'prebuilt'"),
        ({"container_image": "my image"}, "isn't the name of a container image"),
        ({"container_image": "docker://me/mine"}, "leave the scheme out"),
        ({"output_dir": ""}, "output_dir must be text that"),
        ({"capture_env_vars": "HOME"}, r"list of names such as \['WANDB_\*'\], not 'HOME'"),
        ({"capture_env_vars": ["A=1"]}, "'A=1', which isn't the name"),
        ({"capture_env_vars": [""]}, "isn't the name"),
        ({"capture_env_vars": [3]}, "isn't the name"),
        ({"timeout": 0}, "timeout must be a number greater than 0"),
        ({"timeout": "3"}, "timeout must be a number greater than 0, or None, not '3'"),
        ({"timeout": True}, "not True"),
        ({"start_timeout": -1.0}, "start_timeout must be a number greater"),
        ({"start_timeout": float("nan")}, "start_timeout must be a number greater"),
        ({"cpu": float("nan")}, "cpu must be a number greater"),
        ({"cpu": 0}, "cpu must be a number greater"),
        ({"memory": "512m"}, "write a number and a unit"),
        ({"memory": "four"}, "write a number and a unit"),
        ({"memory": 4}, "that is 4 bytes"),
        ({"memory": "-4Gi"}, "write a number"),
        ({"memory": 4.5}, "not float"),
        ({"spot": "yes"}, "spot must be True or False"),
        ({"debug": 1}, "debug must be True or False"),
        ({"volumes": {"data": DATA}}, "not an absolute path such as '/data'"),
        ({"volumes": {3: DATA}}, "not an absolute path"),
        ({"volumes": {"/": DATA}}, "can't be mounted at '/'"),
        ({"volumes": {"/usr/": DATA}}, "can't be mounted at '/usr'"),
        ({"volumes": {"/proc/self": DATA}}, "can't be mounted"),
        ({"volumes": {"/data/../etc": DATA}}, "without '..'"),
        (
            {"volumes": {"/d": DATA, "/d/": DATA}},
            "'/d' twice",
        ),
    ],
    ids=str,
)
def test_an_invalid_value_is_refused_when_decorating(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        kinetic.run(**settings)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("volumes", [["/data"], "/data", {"/data": "./data"}, {"/data": Path(".")}])
def test_volumes_of_another_type_are_a_type_error(volumes: Any) -> None:
    with pytest.raises(TypeError, match=r"Data\("):
        kinetic.run(volumes=volumes)


def test_volumes_are_normalised_and_kept_apart_from_the_callers_dict() -> None:
    data = kinetic.Data("gs://bucket/data/")
    volumes = {"/data/": data, "/mnt//x": data}
    options = Options(volumes=volumes)
    volumes.clear()
    assert options.volumes == {"/data": data, "/mnt/x": data}


def test_debugging_on_a_spot_machine_warns_at_the_users_line() -> None:
    with pytest.warns(UserWarning, match="may be preempted") as caught:
        decorated = kinetic.run(debug=True, spot=True)(plain)
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.warns(UserWarning, match="may be preempted") as caught:
        kinetic.run(debug=True)(plain).options(spot=True)
    assert [warning.filename for warning in caught] == [__file__]
    assert decorated.options(timeout=3).__kinetic__.spot, "the warning comes only once"


def test_an_unknown_setting_names_the_nearest() -> None:
    with pytest.raises(TypeError, match="did you mean 'accelerator'"):
        kinetic.run()(plain).options(acelerator="cpu")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="did you mean 'accelerator'"):
        kinetic.run(acelerator="cpu")  # type: ignore[call-overload]


def test_the_error_about_a_misplaced_option_names_the_right_place() -> None:
    with pytest.raises(TypeError, match=r"run_async_map\(inputs, retries="):
        kinetic.run(retries=2)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"f\.options\(timeout="):
        kinetic.run()(plain).run_async_map([1], timeout=3)  # type: ignore[call-arg]


# --- settings of a function ---


def bind(function: Callable[..., Any]) -> Callable[..., Any]:
    class Model:
        method = function

    return Model().method


@pytest.mark.parametrize(
    "wrap",
    [
        lambda function: function,
        lambda function: functools.partial(function, 1),
        lambda function: functools.partial(functools.partial(function, 1)),
        bind,
        lambda function: functools.partial(bind(function)),
    ],
    ids=["itself", "partial", "partial twice", "method", "partial of a method"],
)
def test_the_settings_of_a_wrapped_function_are_found(
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> None:
    found, settings = settings_of(wrap(kinetic.run(accelerator="l4")(plain)))
    assert settings.accelerator == "l4"
    assert "kinetic function" not in repr(found)
    undecorated = wrap(plain)
    assert settings_of(undecorated) == (undecorated, Options())


def test_a_wrapper_of_a_decorated_function_does_not_inherit_its_settings() -> None:
    """functools.wraps copies attributes, but must not copy the settings."""

    @functools.wraps(kinetic.run(accelerator="l4")(plain))
    def wrapper(number: int) -> int:
        return number + 1

    assert settings_of(wrapper) == (wrapper, Options())
