"""Show the contents of images without building them."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Kinetic


def test_the_images_of_a_function_are_shown_without_building_them(
    kinetic: Kinetic, tmp_path: Path
) -> None:
    (tmp_path / "requirements.txt").write_text("numpy==2.0\n")
    file = tmp_path / "model.py"
    file.write_text(
        "import kinetic\n"
        "@kinetic.run(accelerator='tpu-v5e-1')\ndef bundled(): pass\n"
        "@kinetic.run('cpu', container_image='prebuilt', base_image_repo='r.io/me')\n"
        "def base(): pass\n"
        "@kinetic.run(container_image='r.io/mine:1')\ndef own(): pass\n"
    )
    shown = kinetic("image", "show", f"{file}:bundled", "--json").json
    assert shown["category"] == "tpu" and shown["requirements"] == "numpy==2.0"
    assert shown["dependencies"] == str(tmp_path / "requirements.txt")
    assert shown["image"] == f"tpu-{shown['digest'][:12]}" and "jax[tpu]" in shown["dockerfile"]
    base = kinetic("image", "show", f"{file}:base", "--json").json
    assert base["image"].startswith("r.io/me/base-cpu:") and base["requirements"]
    assert "requirements.txt" not in base["dockerfile"]
    own = kinetic("image", "show", f"{file}:own", "--json").json
    assert (own["image"], own["files"], own["dockerfile"]) == ("r.io/mine:1", 0, "")


def test_the_dependencies_in_the_comment_of_a_script_are_shown(
    kinetic: Kinetic, tmp_path: Path
) -> None:
    (tmp_path / "requirements.txt").write_text("numpy==2.0\n")
    file = tmp_path / "alone.py"
    block = "# /// script\n# dependencies = ['six==1.16']\n# ///\n"
    file.write_text(f"{block}import functools\ndef f(): pass\ng = functools.partial(f)\n")
    for name in ("f", "g"):
        shown = kinetic("image", "show", f"{file}:{name}", "--json").json
        assert (shown["requirements"], shown["dependencies"]) == ("six==1.16", str(file))


def test_base_images_are_named_and_printed_without_building_them(kinetic: Kinetic) -> None:
    completed = kinetic("build-image", "--repo", "r.io/me", "--dry-run", "--json", "--tag", "7")
    assert [image["image"] for image in completed.json["items"]] == [
        f"r.io/me/base-{kind}:7" for kind in ("cpu", "gpu", "tpu")
    ]
    printed = kinetic("build-image", "--repo", "r.io/me", "--print", "--category", "gpu").out
    assert printed.startswith("# r.io/me/base-gpu:") and 'CMD ["python3"]' in printed
    unnamed = kinetic("build-image", "--print", "--category", "cpu").out
    assert unnamed.startswith("# base-cpu:") and "FROM " in unnamed
    assert kinetic("build-image").code == 2
    assert "pass --repo" in kinetic("build-image").err


def test_a_tag_and_a_dockerfile_that_are_none_are_refused(kinetic: Kinetic, tmp_path: Path) -> None:
    completed = kinetic("build-image", "--repo", "r.io/me", "--dry-run", "--tag", "two words")
    assert completed.code == 2 and "the tag 'two words'" in completed.err
    (tmp_path / "Dockerfile").write_bytes(b"\xff")
    order = ("build-image", "--repo", "r.io/me", "--dry-run")
    completed = kinetic(*order, "--dockerfile", str(tmp_path / "Dockerfile"))
    assert completed.code == 2 and "not a Dockerfile" in completed.err
