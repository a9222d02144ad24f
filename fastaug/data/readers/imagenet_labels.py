"""Labels of ImageNet's validation images and names of its classes, from Kaggle or the devkit."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fastaug.data.readers.archive import ArchiveLimits, read_archive
from fastaug.data.readers.mat_file import read_struct_array
from fastaug.errors import DataError, parser_errors

SOLUTION = "LOC_val_solution.csv"
MAPPING = "LOC_synset_mapping.txt"
DEVKIT = "ILSVRC2012_devkit_t12"
_DEVKIT_NAMES = (DEVKIT, f"{DEVKIT}.tar.gz", f"{DEVKIT}.tgz", f"{DEVKIT}.tar")
_TRUTH, _META = "data/ILSVRC2012_validation_ground_truth.txt", "data/meta.mat"
_MAX_FILE = 2**24  # bytes; the largest, LOC_val_solution.csv, has 3 MB
_LIMITS = ArchiveLimits("ImageNet's devkit", file=_MAX_FILE, archive=2**27)  # it has 3 MB
_CLASSES = 1000
"""Larger numbers are groups of classes."""

WNID = re.compile(r"n\d{8}", re.ASCII)
"""Id of a class in WordNet."""
_IMAGE = re.compile(r"ILSVRC2012_val_(\d{8})(?:\.JPEG)?", re.ASCII)


@dataclass(frozen=True)
class Labels:
    """The class of each validation image, by the number in its name."""

    place: Path
    """Where the labels are from."""
    wnid: Mapping[int, str]


def image_number(name: str) -> int | None:
    """The number of a validation image; None if this is not a name of one."""
    found = _IMAGE.fullmatch(name)
    return int(found[1]) if found else None


def read_labels(folders: list[Path], images: Path) -> Labels:
    """From Kaggle's CSV or from the devkit, in the first of the folders that has one of them."""
    for folder in folders:
        if (file := folder / SOLUTION).is_file():
            return Labels(file, _read_solution(file))
        if devkit := _devkit_in(folder):
            return Labels(devkit, _read_truth(devkit))
    places = ", ".join(map(str, folders))
    raise DataError(
        f"{images}: the labels are missing: found neither {SOLUTION} (Kaggle) nor {DEVKIT} (folder "
        f"or .tar.gz) in {places}; put one of them there"
    )


def read_class_names(folders: list[Path]) -> dict[str, str]:
    """WordNet id -> class name, "n01440764 tench": names repeat, so the id remains. Empty if there
    is neither Kaggle's list nor the devkit."""
    for folder in folders:
        if (file := folder / MAPPING).is_file():
            return _read_mapping(file)
        if devkit := _devkit_in(folder):
            return {wnid: _class_name(wnid, words) for wnid, words in _synsets(devkit).values()}
    return {}


def _class_name(wnid: str, words: str) -> str:
    return f"{wnid} {words.partition(',')[0]}".strip()


# --- Kaggle ---


def _read_solution(file: Path) -> dict[int, str]:
    """ImageId,PredictionString: the class is the first word of the second column."""
    found: dict[int, str] = {}
    with parser_errors(f"{file}: not a readable CSV", "; download it again"):
        for row in csv.reader(_lines(file)):
            if row in ([], ["ImageId", "PredictionString"]):
                continue
            number = image_number(row[0])
            wnid = row[1].partition(" ")[0] if len(row) > 1 else ""
            if number is None or not WNID.fullmatch(wnid):
                raise DataError(
                    f"{file}: a row must be ILSVRC2012_val_NUMBER,CLASS ... with a class such as "
                    f"n01440764, got {','.join(row)[:60]!r}"
                )
            found[number] = wnid
    return found


def _read_mapping(file: Path) -> dict[str, str]:
    names = {}
    for line in filter(None, _lines(file)):
        wnid, _, words = line.partition(" ")
        if not WNID.fullmatch(wnid):
            raise DataError(
                f"{file}: a line must be a class such as n01440764 and its names, got {line[:60]!r}"
            )
        names[wnid] = _class_name(wnid, words)
    return names


def _lines(file: Path) -> list[str]:
    return _text(_read_bounded(file), file).splitlines()


def _text(content: bytes, where: Path) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 text ({error})") from error


# --- devkit ---


def _devkit_in(folder: Path) -> Path | None:
    return next((folder / name for name in _DEVKIT_NAMES if (folder / name).exists()), None)


def _read_truth(devkit: Path) -> dict[int, str]:
    """One number of a class for each image."""
    synsets, found = _synsets(devkit), {}
    place = devkit / _TRUTH
    numbers = _text(_devkit_file(devkit, _TRUTH), place).split()
    for image, number in enumerate(numbers, 1):
        label = int(number) if re.fullmatch("[0-9]{1,9}", number) else 0
        if label not in synsets:
            raise DataError(
                f"{place}, line {image}: must be one of the {len(synsets):,} class numbers of "
                f"{_META}, got {number[:20]!r}"
            )
        found[image] = synsets[label][0]
    return found


def _synsets(devkit: Path) -> dict[int, tuple[str, str]]:
    """Number of each class -> WordNet id and names."""
    found, place = {}, devkit / _META
    for synset in read_struct_array(_devkit_file(devkit, _META), "synsets", place):
        number, wnid = synset.get("ILSVRC2012_ID"), synset.get("WNID")
        if not isinstance(number, int) or not isinstance(wnid, str) or not WNID.fullmatch(wnid):
            raise DataError(
                f"{place}: a synset must have ILSVRC2012_ID and WNID, got {number} and {wnid!r:.60}"
            )
        if number <= _CLASSES:
            found[number] = (wnid, str(synset.get("words") or ""))
    return found


def _devkit_file(devkit: Path, name: str) -> bytes:
    """A file of the devkit, a folder or an archive."""
    if devkit.is_dir():
        return _read_bounded(devkit / name)
    member = f"{DEVKIT}/{name}"
    _, contents = read_archive(devkit, {member}, _LIMITS)
    if member not in contents:
        raise DataError(f"{devkit}: {member} is missing from the archive; download it again")
    return contents[member]


def _read_bounded(file: Path) -> bytes:
    try:
        if not file.is_file():  # also a pipe, which would block
            raise DataError(f"{file}: the file is missing")
        if (size := file.stat().st_size) > _MAX_FILE:
            raise DataError(f"{file}: {size} bytes are too many, up to {_MAX_FILE} are allowed")
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror})") from error
