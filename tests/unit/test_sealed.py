"""Which checkpoint is the newest, what is deleted, and what may stand in the way."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colocate.checkpoints import sealed
from colocate.checkpoints.best import BestCheckpoint
from colocate.checkpoints.sealed import CheckpointError, find, list_checkpoints, rotate, writing


def write(output_dir: Path, step: int) -> Path:
    directory = output_dir / f"checkpoint-{step}"
    with writing(directory) as partial:
        (partial / "weights").write_text(f"step {step}")
    return directory


def names(output_dir: Path) -> list[str]:
    return [c.name for c in list_checkpoints(output_dir)]


# ── The clock ────────────────────────────────────────────────────────────────────────────────────────────

CLOCK = st.one_of(st.floats(0, 4e9), st.just(0.0))


@settings(max_examples=30)
@given(st.lists(st.tuples(CLOCK, st.integers(1, 6)), min_size=1, max_size=8), st.integers(1, 3))
def test_whatever_the_clock_says_the_last_written_are_kept(writes, limit):
    """Steps may come again, as in a run that began anew in the same directory."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sealed, "_flush", lambda path: None)
        expected: list[str] = []
        for now, step in writes:
            patch.setattr(sealed.time, "time", lambda now=now: now)
            directory = write(Path(name), step)
            rotate(Path(name), limit, keep=None)
            expected = [*(c for c in expected if c != directory.name), directory.name][-limit:]
            assert names(Path(name)) == expected
            assert find(True, Path(name)) == directory


@pytest.mark.parametrize("written_at", [1e300, 1e12])
def test_a_checkpoint_from_the_future_is_not_the_newest_for_ever(tmp_path, written_at):
    """From a node whose clock is ahead."""
    manifest = write(tmp_path, 2) / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"written_at": written_at}))
    later = write(tmp_path, 1)
    assert find(True, tmp_path) == later
    rotate(tmp_path, 1, keep=None)
    assert names(tmp_path) == ["checkpoint-1"]


# ── What cannot be deleted ───────────────────────────────────────────────────────────────────────────────


def moved_to_another_disk(output_dir: Path) -> None:
    write(output_dir, 1).rename(output_dir / "elsewhere")
    (output_dir / "checkpoint-1").symlink_to(output_dir / "elsewhere")


def link_without_target(output_dir: Path) -> None:
    (output_dir / "checkpoint-1").symlink_to(output_dir / "nowhere")


def file_of_that_name(output_dir: Path) -> None:
    (output_dir / "checkpoint-1").write_text("a file")


def directory_of_somebody_else(output_dir: Path) -> None:
    (output_dir / "checkpoint-1").mkdir()
    (output_dir / "checkpoint-1" / "theirs").write_text("")


def leftover_that_is_a_file(output_dir: Path) -> None:
    (output_dir / "partial-checkpoint-1").write_text("a file")


def leftover_that_stays(output_dir: Path) -> None:
    for prefix in ("partial", "partial-replaced"):
        (output_dir / f"{prefix}-checkpoint-1" / "busy").mkdir(parents=True)


def busy(output_dir: Path) -> None:
    (write(output_dir, 1) / "busy").mkdir()


@pytest.fixture
def busy_directories(monkeypatch):
    """As NFS refuses to delete what is open elsewhere."""
    rmtree = shutil.rmtree

    def refuse(path, *args, **kwargs):
        if (Path(path) / "busy").exists():
            raise OSError(39, "Directory not empty", str(path))
        rmtree(path, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", refuse)


@pytest.mark.parametrize(
    ("obstacle", "told"),
    [
        (moved_to_another_disk, "is a link to"),
        (link_without_target, "was no checkpoint"),
        (file_of_that_name, "was no checkpoint"),
        (directory_of_somebody_else, "was no checkpoint"),
        (leftover_that_is_a_file, ""),
        (leftover_that_stays, "could not be deleted"),
        (busy, "could not be deleted"),
    ],
)
def test_what_stands_in_the_way_is_told_once_and_the_run_goes_on(
    tmp_path, caplog, busy_directories, obstacle, told
):
    obstacle(tmp_path)
    with caplog.at_level(logging.WARNING, "colocate"):
        for step in (2, 3, 4):
            written = write(tmp_path, step)
            rotate(tmp_path, 1, keep=None, written=written)
            assert find(True, tmp_path) == written
        sealed.verify(write(tmp_path, 1))  # under the very name of the obstacle
    assert told in caplog.text
    assert len({record.message for record in caplog.records}) == len(caplog.records)
    assert [d for d in names(tmp_path) if d != "checkpoint-1"] == ["checkpoint-4"]
    if obstacle in (moved_to_another_disk, directory_of_somebody_else):  # not ours to delete
        kept = "elsewhere" if obstacle is moved_to_another_disk else "checkpoint-1.replaced"
        assert any((tmp_path / kept).iterdir())


# ── Finding ──────────────────────────────────────────────────────────────────────────────────────────────


def test_auto_goes_on_if_there_is_something_to_go_on_from(tmp_path):
    assert find("auto", tmp_path / "nowhere") is None
    (tmp_path / "checkpoint-7").mkdir()  # not sealed
    assert find("auto", tmp_path) is None
    with pytest.raises(CheckpointError, match="resume_from_checkpoint='auto' does either"):
        find(True, tmp_path)
    written = write(tmp_path, 3)
    assert find("auto", tmp_path) == find(True, tmp_path) == written


def test_another_format_is_refused(tmp_path):
    manifest = write(tmp_path, 1) / "manifest.json"
    content = json.loads(manifest.read_text())
    del content["format"]
    manifest.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="has format 1, and this version of colocate reads format 2"):
        sealed.verify(tmp_path / "checkpoint-1")


def test_where_the_best_alone_stays_a_link_is_told_and_left(tmp_path, caplog):
    elsewhere = tmp_path / "bigger disk"
    (tmp_path / "run").mkdir()
    best, old, linked = (write(tmp_path / "run", step) for step in (1, 2, 3))
    shutil.move(linked, elsewhere)
    linked.symlink_to(elsewhere)
    keeper = BestCheckpoint(SimpleNamespace(save_total_limit=1))
    with caplog.at_level(logging.WARNING):
        keeper.delete_others(SimpleNamespace(best_model_checkpoint=str(best)), tmp_path / "run")
    assert best.is_dir() and not old.exists()
    assert linked.is_symlink() and (elsewhere / "weights").read_text() == "step 3"
    assert "which is yours to delete" in caplog.text
    assert not list((tmp_path / "run").glob("partial-*"))
