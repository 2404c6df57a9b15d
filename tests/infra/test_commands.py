"""Run the commands as a person would: set up a cluster, run a job on it, and remove it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import kinetic.aio.infra
from kinetic.accelerators import parse
from kinetic.aio.infra import Infrastructure, Pool, Site
from tests.cluster.fixtures import Namespace
from tests.infra.console import SITE, Console
from tests.infra.google import Google
from tests.infra.sites import up

PLAN = Path(__file__).parent / "plan.txt"
WRITES = os.environ.get("KINETIC_GOLDEN") == "write"


@pytest.fixture
def console(google: Google, tmp_path: Path) -> Console:
    return Console.of(google, tmp_path)


async def test_the_quota_project_of_a_login_pays_for_requests(
    console: Console, google: Google
) -> None:
    login = console.folder / "adc.json"
    login.write_text(json.dumps({**json.loads(login.read_text()), "quota_project_id": "payer"}))
    await console.run("up", *SITE, "--preview")
    assert google.payers == {"payer"}


async def test_a_preview_shows_each_part_and_its_cost(console: Console, google: Google) -> None:
    output = await console.run("up", *SITE, "--preview")
    assert "+ create   cluster lab" in output
    assert "an hour" in output
    assert google.writes == 0
    output = await console.run("up", *SITE, "--preview", "--json")
    plan = json.loads(output.partition("\nkinetic: ")[0])
    assert plan["schema"] == "kinetic.plan/1"
    assert {change["action"] for change in plan["changes"]} == {"create", "update"}


async def test_down_never_takes_the_project_of_gcloud_alone(console: Console) -> None:
    console.environ["GOOGLE_CLOUD_PROJECT"] = "acme-1"
    refusal = await console.run("down", exit_code=2)
    assert "--project" in refusal
    assert "KINETIC_KUBE_CONTEXT" not in refusal  # the command ignores it


@pytest.mark.full
async def test_a_failure_ends_with_an_exit_code_and_a_next_step(
    console: Console, google: Google
) -> None:
    assert "kinetic up" in await console.run("pool", "list", *SITE, exit_code=3)
    assert "no pool" in await console.run("pool", "add", *SITE, "--accelerator", "cpu", exit_code=2)
    google.billing = False
    assert "billing" in await console.run("up", *SITE, "-y", exit_code=2)


@pytest.mark.full
async def test_a_stock_out_prints_the_command_for_the_next_zone(
    console: Console, google: Google, lab: Infrastructure
) -> None:
    google.stockout["us-central1-a"] = "europe-west4-a,us-central1-f"
    add = ("pool", "add", *SITE, "--accelerator", "tpu-v6e-16", "--spot", "-y")
    output = await console.run(*add, exit_code=1)
    (line,) = [line for line in output.splitlines() if "run: kinetic pool add" in line]
    again = line.partition("kinetic pool")[2].split()
    assert again[1:-2] == [*SITE, "--accelerator", "tpu-v6e-16", "--spot", "-y"]
    assert again[-2:] == ["--node-zone", "us-central1-f"]
    await console.run("pool", *again)


@pytest.mark.full
async def test_a_terminal_is_asked_for_the_next_zone(
    console: Console, google: Google, lab: Infrastructure
) -> None:
    google.stockout["us-central1-a"] = "us-central1-f"
    add = ("pool", "add", *SITE, "--accelerator", "tpu-v6e-16")
    output = await console.typed("y\ny\ny\n", *add)
    assert "Try the zone us-central1-f?" in output
    (pool,) = [
        document for key, document in google.documents.items() if key.endswith("/tpu-v6e-16")
    ]
    assert pool["locations"] == ["us-central1-f"]


@pytest.mark.full
async def test_one_ctrl_c_at_a_prompt_ends_the_command(
    console: Console, google: Google, infra: Infrastructure
) -> None:
    add = ("pool", "add", *SITE, "--accelerator", "tpu-v6e-16")
    for question, command in (
        ("Change the project acme-1 as planned?", ("up", *SITE)),
        ("Add the pool", add),
        ("Type lab to remove it", ("down", *SITE)),
    ):
        if command[0] == "pool":
            await up(infra)
        writes = google.writes
        printed = await console.interrupted(question, *command)
        assert printed.endswith("kinetic: interrupted\r\n") and "Traceback" not in printed
        assert google.writes == writes


QUESTION = "The cluster is lab in us-central1-a of the project acme-1. Type lab to remove it: "


@pytest.mark.parametrize(
    "command",
    [
        ("up",),
        pytest.param(("pool", "add", "--accelerator", "tpu-v6e-16"), marks=pytest.mark.full),
        pytest.param(("pool", "remove", "tpu-v6e-16"), marks=pytest.mark.full),
        pytest.param(("down",), marks=pytest.mark.full),
    ],
)
async def test_a_command_without_an_answer_needs_yes(
    console: Console, google: Google, infra: Infrastructure, command: tuple[str, ...]
) -> None:
    if command[0] != "up":
        await up(infra)
    if command[1:2] == ("remove",):
        await infra.apply(await infra.plan_pool(Pool(accelerator=parse("tpu-v6e-16"))))
    writes = google.writes
    output, refusal = await console.streams(*command, *SITE, exit_code=2)
    assert "plan for lab in us-central1-a" in output and "--yes" in refusal
    _, refusal = await console.streams(*command, *SITE, stdin="n\n", exit_code=1)
    assert "The cluster is lab in us-central1-a" in refusal and "nothing was done" in refusal
    assert google.writes == writes


@pytest.mark.full
async def test_down_takes_only_the_clusters_name_as_an_answer(
    console: Console, google: Google, lab: Infrastructure
) -> None:
    writes = google.writes
    await console.streams("down", *SITE, stdin="y\ny\n", exit_code=1)
    assert google.writes == writes
    output, shown = await console.streams("down", *SITE, "--json", stdin="lab\n")
    plan = json.loads(output)
    assert (plan["schema"], plan["zone"]) == ("kinetic.plan/1", "us-central1-a")
    assert QUESTION in shown
    assert {key.rpartition("/")[2] for key in google.documents} == {
        "acme-1-kn-lab-jobs",
        "acme-1-kn-lab-builds",
    }


@pytest.mark.full
async def test_a_closed_standard_input_gives_no_answer(
    console: Console, google: Google, lab: Infrastructure
) -> None:
    writes = google.writes
    line = "kinetic down --project acme-1 --cluster lab <&-; exit $?"
    refused = await console.in_shell(line, "--yes", b"", exit_code=2)
    assert google.writes == writes
    assert "Traceback" not in refused


@pytest.mark.full
@pytest.mark.parametrize(
    ("redirection", "seen_in_log"),
    [
        ("| tee log", False),
        pytest.param("> log 2>&1", True, marks=pytest.mark.full),
        pytest.param("2>&1 | cat > log", True, marks=pytest.mark.full),
    ],
)
async def test_a_terminal_is_asked_although_the_output_goes_elsewhere(
    console: Console, google: Google, lab: Infrastructure, redirection: str, seen_in_log: bool
) -> None:
    line = f"kinetic down --project acme-1 --cluster lab {redirection}"
    writes = google.writes
    shown = await console.in_shell(line, QUESTION, b"no\r", exit_code=1)
    assert google.writes == writes
    log = (console.folder / "log").read_text()
    assert "- remove   cluster lab" in log and QUESTION not in log
    assert ("nothing was done" in log, "nothing was done" in shown) == (
        seen_in_log,
        not seen_in_log,
    )
    await console.in_shell(line, QUESTION, b"lab\r")
    assert not any("/clusters/" in key for key in google.documents)


@pytest.mark.full
async def test_up_offers_a_project_and_its_billing_account_on_the_terminal(
    console: Console, google: Google
) -> None:
    google.exists, google.endpoint = False, "127.0.0.1:1"
    google.accounts = [
        {"name": "billingAccounts/A", "displayName": "old", "open": False},
        {"name": "billingAccounts/B", "displayName": "team", "open": True},
        {"name": "billingAccounts/C", "displayName": "other", "open": True},
    ]
    line = "kinetic up --project acme-1 --cluster lab > log 2>&1"
    keys = b"y\rnone\rC\rn\r"
    shown = await console.in_shell(line, "acme-1 doesn't exist. Create", keys, exit_code=1)
    assert shown.count("C  other") == 2 and "A  old" not in shown
    assert "billing acme-1" in (console.folder / "log").read_text()
    assert not google.exists and not google.writes


@pytest.mark.parametrize(
    ("variable", "options", "deletes"),
    [
        ("", (), False),
        ("1", (), True),
        pytest.param("1", ("--keep-results",), False, marks=pytest.mark.full),
        pytest.param("0", (), False, marks=pytest.mark.full),
        pytest.param("0", ("--delete-results",), True, marks=pytest.mark.full),
        pytest.param("", ("--force-destroy",), True, marks=pytest.mark.full),
    ],
)
async def test_results_go_only_on_request(
    console: Console,
    lab: Infrastructure,
    variable: str,
    options: tuple[str, ...],
    deletes: bool,
) -> None:
    console.environ["KINETIC_FORCE_DESTROY"] = variable
    plan = json.loads((await console.streams("down", *SITE, *options, "--preview", "--json"))[0])
    actions = {change["name"]: change["action"] for change in plan["changes"]}
    assert actions["acme-1-kn-lab-jobs"] == ("remove" if deletes else "keep")


@pytest.fixture
async def keys(google: Google, infra: Infrastructure) -> list[str]:
    """Make a cluster of the same name in two locations; return the documents of the first one."""
    await up(infra)
    keys = [key for key in google.documents if "/clusters/lab" in key]
    for key in keys:
        copy = {**google.documents[key], "location": "us-east1-b"}
        google.documents[key.replace("us-central1-a", "us-east1-b")] = copy
    return keys


@pytest.mark.full
async def test_the_status_names_the_other_clusters_of_a_name(
    console: Console, keys: list[str]
) -> None:
    console.environ["KINETIC_ZONE"] = "us-central1-a"
    status = await console.run("status", *SITE)
    assert "other clusters lab are in us-east1-b" in status


@pytest.mark.full
async def test_a_name_in_several_locations_needs_the_option_zone(
    console: Console, google: Google, keys: list[str]
) -> None:
    console.environ["KINETIC_ZONE"] = "us-central1-a"
    refusal = await console.run("down", *SITE, "-y", exit_code=2)
    assert "us-central1-a, us-east1-b; pass --zone" in refusal
    await console.run("down", *SITE, "--zone", "us-east1-b", "--delete-results", "-y")
    assert not any("us-east1-b" in key for key in google.documents)
    assert {*keys} <= {*google.documents}
    assert "storage/storage/v1/b/acme-1-kn-lab-jobs" in google.documents


@pytest.mark.full
async def test_a_profile_of_another_cluster_names_none_to_remove(
    console: Console, google: Google
) -> None:
    create = ("profile", "create", "mine", "--project", "acme-1", "--kube-context", "kind-kind")
    await console.run(*create)
    for command in (("up",), ("down",), ("pool", "list")):
        refusal = await console.run(*command, exit_code=2)
        assert "'kind-kind'" in refusal and "--project" in refusal
    assert not google.requests
    assert "kinetic up" in await console.run("pool", "list", *SITE, exit_code=3)


async def test_from_nothing_to_a_cluster_and_back(
    google: Google, namespace: Namespace, tmp_path: Path
) -> None:
    """The cluster that the stand-in of Google creates is the control plane of the tests."""
    google.endpoint = namespace.admin.server.removeprefix("https://")
    console = Console.of(google, tmp_path, token=namespace.admin.token)
    console.environ["SSL_CERT_FILE"] = str(namespace.admin.ca)  # a cluster's DNS name is public
    place = (*SITE, "--namespace", namespace.name)
    output = await console.run("up", *place, "--accelerator", "tpu-v6e-8", "-y")
    assert "saved the profile" in output
    account = namespace.call("GET", "serviceaccounts/kinetic")
    assert "kn-lab-w" in str(account["metadata"]["annotations"])
    assert "nothing to change" in await console.run("up", *place, "-y")
    shown: dict[str, Any] = json.loads(await console.run("profile", "show", "--json"))
    assert shown["store"] == f"gs://acme-1-kn-lab-jobs/{namespace.name}"
    (tmp_path / "store").mkdir()
    joined = ("--store", str(tmp_path / "store"), "--profile-name", "joined")
    assert "nothing to create" in await console.run("init", *place, *joined)
    annotation = "iam.gke.io/gcp-service-account: kn-lab-w"
    assert annotation in await console.run("init", *place, "--print")
    other = ("--namespace", f"{namespace.name}-b")
    assert annotation not in await console.run("init", *SITE, *other, "--print")
    assert "tpu-v6e-8" in await console.run("pool", "list")
    found = json.loads(await console.run("status", "--json"))
    assert (found["state"], found["work"]) == ("RUNNING", [])
    lab = google.documents["container/v1/projects/acme-1/locations/us-central1-a/clusters/lab"]
    name = "a-cluster-that-another-tool-made"
    location = "container/v1/projects/acme-1/locations/us-east1"
    google.documents[f"{location}/clusters/{name}"] = {**lab, "name": name, "location": "us-east1"}
    elsewhere = ("--project", "acme-1", "--zone", "us-east1", "--cluster", name)
    found = json.loads(await console.run("status", *elsewhere, "--json"))
    assert (found["state"], found["zone"], found["context"]) == ("RUNNING", "us-east1", "")
    del google.documents[f"{location}/clusters/{name}"]
    assert "is removed" in await console.run("pool", "remove", "tpu-v6e-8", "-y")
    await console.run("down", "--delete-results", "-y")
    assert not google.documents


async def test_the_coroutines_plan_and_carry_out(
    console: Console,
    google: Google,
    infra: Infrastructure,
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in console.environ.items():
        monkeypatch.setenv(name, value)
    google.looks = 0
    planned = await kinetic.aio.infra.up(site, preview=True)
    assert planned.steps and google.writes == 0
    await up(infra)
    slices = Pool(accelerator=parse("tpu-v6e-16"))
    await kinetic.aio.infra.add_pool(site, slices)
    lines: list[str] = []
    found = await kinetic.aio.infra.list_pools(site, tell=lines.append)
    assert [pool["name"] for pool in found] == ["system", "tpu-v6e-16"]
    assert "ComputeClasses" in lines[0]
    await kinetic.aio.infra.remove_pool(site, "tpu-v6e-16", preview=True)
    (removal,) = (await kinetic.aio.infra.remove_pool(site, "tpu-v6e-16")).steps
    assert removal.name == "tpu-v6e-16"
    await kinetic.aio.infra.down(site, force_destroy=True)
    assert not google.documents


async def test_a_plan_of_a_cluster_and_three_pools(console: Console) -> None:
    """`KINETIC_GOLDEN=write` rewrites the file; check the difference."""
    names = ("gpu-l4:spot", "tpu-v6e-8", "tpu-v5e-16")
    pools = [word for name in names for word in ("--accelerator", name)]
    output = await console.run("up", *SITE, *pools, "--preview")
    if WRITES:
        PLAN.write_text(output)
    assert output == PLAN.read_text()
