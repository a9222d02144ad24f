"""Checkpoint files: what was written comes back, and nothing else is taken for it."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import pickle
import random
import resource
import zipfile
from collections.abc import Callable
from copy import copy as copy_of
from pathlib import Path

import pytest
import torch
from expect import raises
from training import assert_same_weights, run

import fastaug
from fastaug.config import TrainConfig
from fastaug.errors import CheckpointError, ConfigError, DamagedCheckpointError
from fastaug.runs import checkpoint
from fastaug.runs.checkpoint import load_checkpoint, write_atomically, write_checkpoint

STATE = {
    "config": {"views": 4},
    "classes": ["cat", "dog"],
    "model": {"w": torch.arange(1000.0)},
    "ema": None,
    "step": 7,
}
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint."""
    write_checkpoint(tmp_path / "last.pt", STATE)
    return tmp_path / "last.pt"


def with_checksum(archive: bytes) -> bytes:
    """The format by hand: the checksum of a zip file without comment, as its comment."""
    assert archive[-2:] == bytes(2)
    comment = b"fastaug sha256 " + hashlib.sha256(archive).hexdigest().encode()
    return archive[:-2] + len(comment).to_bytes(2, "little") + comment


def saved_by_torch(state: object) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def test_round_trip(path: Path) -> None:
    state = load_checkpoint(path)
    assert (state["step"], state["config"]) == (7, {"views": 4})
    assert torch.equal(state["model"]["w"], torch.arange(1000.0))
    assert os.listdir(path.parent) == ["last.pt"]


def test_others_can_read_it(path: Path) -> None:
    state = torch.load(path, weights_only=True)
    assert (state["format"], state["version"]) == (3, fastaug.__version__)
    assert torch.equal(state["model"]["w"], torch.arange(1000.0))
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        without = path.read_bytes()[: -len(archive.comment) - 2] + bytes(2)
        expected = hashlib.sha256(without).hexdigest()
        assert archive.comment.decode() == f"fastaug sha256 {expected}"


def test_what_the_format_says_is_read(tmp_path: Path) -> None:
    archive = saved_by_torch({"format": 2, "version": "99.0", **STATE})
    (tmp_path / "x.pt").write_bytes(with_checksum(archive))
    state = load_checkpoint(tmp_path / "x.pt")
    assert (state["version"], state["step"]) == ("99.0", 7)


def places(length: int) -> list[int]:
    """Bytes of a checkpoint: its ends, all of its comment with its length, some in between."""
    return sorted(
        {0, 1, 3, *range(length - 90, length)} | set(random.Random(0).choices(range(length), k=200))
    )


def is_found_damaged(path: Path) -> bool:
    try:
        load_checkpoint(path)
    except DamagedCheckpointError as error:
        return str(error).startswith(f"{path}: ")
    return False


def test_any_bit_that_is_turned_is_found(path: Path) -> None:
    whole = path.read_bytes()
    rng = random.Random(1)
    for place in places(len(whole)):
        torn = bytearray(whole)
        torn[place] ^= 1 << rng.randrange(8)
        path.write_bytes(torn)
        assert is_found_damaged(path), f"byte {place} of {len(whole)}"


def test_any_end_that_is_missing_is_found(path: Path) -> None:
    whole = path.read_bytes()
    for length in places(len(whole)):
        path.write_bytes(whole[:length])
        assert is_found_damaged(path), f"{length} of {len(whole)} bytes"


@pytest.mark.parametrize("tail", [b"\0", b"\0" * 4096, b"more"], ids=len)
def test_an_end_that_is_too_much_is_found(path: Path, tail: bytes) -> None:
    path.write_bytes(path.read_bytes() + tail)
    with pytest.raises(DamagedCheckpointError):
        load_checkpoint(path)


def test_zeros_in_the_place_of_a_page_are_found(path: Path) -> None:
    """What a file system leaves after a power cut."""
    whole = path.read_bytes()
    path.write_bytes(whole[:1024] + bytes(1024) + whole[2048:])
    with raises(DamagedCheckpointError, "checksum"):
        load_checkpoint(path)


def test_a_checksum_that_is_missing(tmp_path: Path) -> None:
    torch.save({"format": 2, "version": fastaug.__version__, **STATE}, tmp_path / "x.pt")
    with raises(DamagedCheckpointError, "x.pt"):
        load_checkpoint(tmp_path / "x.pt")


def test_a_missing_checkpoint(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no.pt"):
        with raises(CheckpointError, str(path)):
            load_checkpoint(path)


def test_a_pipe_or_a_device_is_not_read(tmp_path: Path) -> None:
    """The one would be waited for, the other has no end."""
    os.mkfifo(tmp_path / "last.pt")
    for path in (tmp_path / "last.pt", Path("/dev/zero")):
        with raises(CheckpointError, str(path)):
            load_checkpoint(path)


def test_a_file_larger_than_the_memory(path: Path) -> None:
    os.truncate(path, 2**42)  # a hole, which takes no space
    with raises(CheckpointError, "4,398,046,511,104"):
        load_checkpoint(path)


def test_a_file_of_weights(tmp_path: Path) -> None:
    (tmp_path / "best.safetensors").touch()
    with raises(CheckpointError, "best.safetensors"):
        load_checkpoint(tmp_path / "best.safetensors")


@pytest.mark.parametrize("content", [b"", b"text\n", b"PK\x03\x04", b"\x80\x02."], ids=repr)
def test_what_is_no_checkpoint(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "last.pt").write_bytes(content)
    with raises(DamagedCheckpointError, "last.pt"):
        load_checkpoint(tmp_path / "last.pt")


@pytest.mark.parametrize(
    ("number", "damage"), [(errno.EIO, True), (errno.EACCES, False), (errno.ESTALE, False)]
)
def test_what_cannot_be_read_is_not_always_damaged(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int, damage: bool
) -> None:
    """Damaged ones are moved aside by --resume: not those of another user, or of a lost server."""

    def fails(_path: Path) -> bytes:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "read_bytes", fails)
    with raises(CheckpointError) as caught:
        load_checkpoint(path)
    assert isinstance(caught.value, DamagedCheckpointError) == damage


def test_too_little_memory_is_no_damage(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory\nsome frames of C++")

    monkeypatch.setattr(torch, "load", fails)
    with raises(CheckpointError, f"{path} DefaultCPUAllocator:") as caught:
        load_checkpoint(path)
    assert type(caught.value) is CheckpointError


class TestOthersFiles:
    @pytest.mark.parametrize("checksum", [False, True])
    def test_a_checkpoint_cannot_run_code(self, tmp_path: Path, checksum: bool) -> None:
        proof = tmp_path / "executed"

        class Malice:
            def __reduce__(self) -> tuple:
                return (os.system, (f"touch {proof}",))

        archive = saved_by_torch({"format": 2, "config": Malice(), "version": "1"})
        files = {
            "evil.pt": with_checksum(archive) if checksum else archive,
            "plain.pt": pickle.dumps(Malice()),
        }
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
            with pytest.raises(CheckpointError):
                load_checkpoint(tmp_path / name)
        assert not proof.exists()
        torch.load(tmp_path / "evil.pt", weights_only=False)
        assert proof.exists(), "the file would not have run anything anyway"

    def test_a_bomb_is_not_inflated(self, tmp_path: Path) -> None:
        """Half a gigabyte of zeros in half a megabyte."""
        file = io.BytesIO()
        with (
            zipfile.ZipFile(io.BytesIO(saved_by_torch({"format": 2, **STATE}))) as original,
            zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        ):
            for entry in original.infolist():
                if entry.filename.endswith("data/0"):
                    with archive.open(entry.filename, "w") as inflated:
                        for _ in range(32):
                            inflated.write(bytes(16 << 20))
                else:
                    archive.writestr(entry.filename, original.read(entry))
        content = file.getvalue()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for bomb in (content, with_checksum(content)):
            (tmp_path / "x.pt").write_bytes(bomb)
            with raises(DamagedCheckpointError, "compressed"):
                load_checkpoint(tmp_path / "x.pt")
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB

    def test_entries_are_stored_as_they_are(self, tmp_path: Path) -> None:
        """However little they inflate to: there may be many."""
        state = {"format": 2, **STATE, "model": torch.randint(256, (5000,), dtype=torch.uint8)}
        file = io.BytesIO()
        with (
            zipfile.ZipFile(io.BytesIO(saved_by_torch(state))) as original,
            zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive,
        ):
            for entry in original.infolist():
                archive.writestr(entry.filename, original.read(entry))
            archive.writestr("archive/room", random.Random(0).randbytes(5000))
        (tmp_path / "x.pt").write_bytes(with_checksum(file.getvalue()))
        assert torch.load(tmp_path / "x.pt")["step"] == 7  # torch itself does not mind
        with raises(DamagedCheckpointError, "compressed"):
            load_checkpoint(tmp_path / "x.pt")

    def test_many_entries_of_one_piece_of_data(self, tmp_path: Path) -> None:
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("archive/data/0", bytes(10_000))
            original = archive.filelist[0]
            for number in range(1, 100):
                copy = copy_of(original)
                copy.filename = f"archive/data/{number}"
                archive.filelist.append(copy)
        (tmp_path / "x.pt").write_bytes(with_checksum(file.getvalue()))
        with raises(DamagedCheckpointError, "larger"):
            load_checkpoint(tmp_path / "x.pt")

    def test_an_entry_that_claims_more_than_there_is(self, tmp_path: Path) -> None:
        archive = bytearray(saved_by_torch({"format": 2, **STATE}))
        entry = archive.rindex(b"PK\x01\x02")
        archive[entry + 24 : entry + 28] = (1 << 31).to_bytes(4, "little")
        (tmp_path / "x.pt").write_bytes(with_checksum(bytes(archive)))
        with raises(DamagedCheckpointError, "larger"):
            load_checkpoint(tmp_path / "x.pt")

    def test_a_bare_state_dict(self, tmp_path: Path) -> None:
        torch.save({"weight": torch.zeros(3)}, tmp_path / "x.pt")
        with raises(CheckpointError, "x.pt --weights"):
            load_checkpoint(tmp_path / "x.pt")

    @pytest.mark.parametrize("state", [[1], {"format": 2}, {"format": 2, "config": 5}], ids=str)
    def test_another_structure(self, tmp_path: Path, state: object) -> None:
        (tmp_path / "x.pt").write_bytes(with_checksum(saved_by_torch(state)))
        with raises(CheckpointError, "x.pt"):
            load_checkpoint(tmp_path / "x.pt")


class TestVersions:
    def test_format_1_is_refused_in_a_line(self, tmp_path: Path) -> None:
        torch.save({"format": 1, **STATE}, tmp_path / "old.pt")
        with raises(CheckpointError, f"{tmp_path}/old.pt 1 {fastaug.__version__} 3") as caught:
            load_checkpoint(tmp_path / "old.pt")
        assert not isinstance(caught.value, DamagedCheckpointError)

    def test_a_run_of_format_2_is_resumed(
        self, tiny: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It has British spelling in four places, and no word on the table of operations."""
        config = tiny(augment="randaugment")
        whole = run(config, "-whole")
        begun = run(config.replace(max_steps=3))
        state = load_checkpoint(begun / "last.pt")
        state["optimiser"] = state.pop("optimizer")
        for settings, prefix in ((state["config"], ""), (state["loader"], "--")):
            settings[f"{prefix}normalise"] = settings.pop(f"{prefix}normalize")
        state["config"]["optimiser"] = state["config"].pop("optimizer")
        del state["loader"]["RandAugment table"]
        with monkeypatch.context() as earlier:
            earlier.setattr(checkpoint, "FORMAT", 2)
            old = {key: value for key, value in state.items() if key not in ("format", "version")}
            write_checkpoint(begun / "last.pt", old)
        assert_same_weights(run(config, checkpoint=begun / "last.pt"), whole)

    def test_a_later_format_names_its_version(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(checkpoint, "FORMAT", 4)
        monkeypatch.setattr(fastaug, "__version__", "99.0")
        write_checkpoint(tmp_path / "new.pt", STATE)
        monkeypatch.undo()
        with raises(CheckpointError, "new.pt 99.0 4"):
            load_checkpoint(tmp_path / "new.pt")

    def test_a_setting_that_this_version_does_not_have(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path / "x.pt", STATE | {"config": {"views": 4, "wings": 2}})
        state = load_checkpoint(tmp_path / "x.pt")
        with raises(ConfigError, "wings"):
            TrainConfig.from_saved(state["config"])


class TestWriting:
    def test_data_before_name_before_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is on the disk after a power cut at any moment is the old file or the new one."""
        events: list[str] = []
        fsync, replace = os.fsync, os.replace

        def spy_fsync(descriptor: int) -> None:
            file = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            events.append(f"fsync {'folder' if file.is_dir() else file.stat().st_size}")
            fsync(descriptor)

        def spy_replace(old: Path, new: Path) -> None:
            events.append(f"rename to {new.name}")
            replace(old, new)

        monkeypatch.setattr(os, "fsync", spy_fsync)
        monkeypatch.setattr(os, "replace", spy_replace)
        write_checkpoint(tmp_path / "x.pt", STATE)
        size = (tmp_path / "x.pt").stat().st_size
        assert events == [f"fsync {size}", "rename to x.pt", "fsync folder"]

    def test_a_failed_write_keeps_the_old_one(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = path.read_bytes()

        def full(_fd: int) -> None:
            raise FULL

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            write_checkpoint(path, STATE | {"step": 8})
        assert path.read_bytes() == before
        assert os.listdir(path.parent) == ["last.pt"]

    @pytest.mark.parametrize("after", [0, 1, 3, 8])
    def test_torch_does_not_hide_what_the_system_said(self, path: Path, after: int) -> None:
        before = path.read_bytes()
        calls: list[int] = []

        class Full(io.BytesIO):
            def write(self, data: object) -> int:
                calls.append(1)
                if len(calls) > after:
                    raise FULL
                return super().write(data)  # type: ignore[arg-type]

        with pytest.raises(OSError, match="No space left") as caught:
            write_atomically(path, lambda _file: torch.save(STATE, Full()))
        assert caught.value.errno == errno.ENOSPC
        assert path.read_bytes() == before

    @pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
    def test_a_folder_that_cannot_be_synced(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        """Some network file systems do not know it. A disk that fails is another matter."""
        fsync = os.fsync

        def fails(descriptor: int) -> None:
            if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_dir():
                raise OSError(number, os.strerror(number))
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", fails)
        if number == errno.EIO:
            with pytest.raises(OSError, match=os.strerror(number)):
                write_checkpoint(tmp_path / "x.pt", STATE)
        else:
            write_checkpoint(tmp_path / "x.pt", STATE)
            assert load_checkpoint(tmp_path / "x.pt")["step"] == 7


def test_a_checkpoint_asks_only_for_tensors(tmp_path: Path) -> None:
    """torch's weights_only would make a bytearray of any size that a few bytes ask for."""
    write_checkpoint(tmp_path / "x.pt", {"config": {}, "filler": bytearray(16)})
    with raises(DamagedCheckpointError, "bytearray"):
        load_checkpoint(tmp_path / "x.pt")
