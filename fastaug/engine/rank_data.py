"""The image sets of all ranks, compared when they start."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace

from fastaug.data.config import DataConfig
from fastaug.data.fingerprint import content_fingerprints, sample_indices, sizes_fingerprint
from fastaug.data.image_set import ImageSet
from fastaug.data.scan import check_max_bad
from fastaug.engine.rank_check import check_same, describe_difference, name_ranks
from fastaug.errors import DataError, few
from fastaug.runtime.distributed import Group

log = logging.getLogger("fastaug")


def agree_on_images(
    group: Group, config: DataConfig, sets: Mapping[str, ImageSet]
) -> dict[str, ImageSet]:
    """Raise ConfigError on every rank if they have different images. sets: scanned, by kind, such
    as "training".

    An image that any rank found bad is bad on all of them: a failing disk does not end the run, and
    all ranks divide the same images among them.
    """
    if group.ranks == 1:
        return dict(sets)
    advice = f"give every machine the same files under --data {config.data}"
    facts = {
        f"the set of {kind} images": f"{len(images):,} images in {len(images.classes):,} classes "
        f"(fingerprint {images.fingerprint})"
        for kind, images in sets.items()
    }
    check_same(group, facts, advice)
    agreed = {kind: _with_all_bad(group, config, images) for kind, images in sets.items()}
    facts = {
        f"the size in pixels of the {kind} images": f"fingerprint {sizes_fingerprint(images)}"
        for kind, images in agreed.items()
    }
    check_same(group, facts, advice)
    for kind, images in agreed.items():
        _compare_content(group, config, kind, images, advice)
    return agreed


def bad_images_of_all(group: Group, sets: Iterable[ImageSet]) -> dict[str, str]:
    """Place of each image that any rank knows to be bad -> reason."""
    own = {images.where(i): reason for images in sets for i, reason in images.bad.items()}
    return {where: reason for bad in group.gather(own) for where, reason in bad.items()}


def _with_all_bad(group: Group, config: DataConfig, images: ImageSet) -> ImageSet:
    """The set with the bad images of all ranks."""
    assert images.manifest is not None
    found = group.gather(dict(images.bad))
    known = {index: reason for bad in reversed(found) for index, reason in bad.items()}
    if all(bad.keys() == known.keys() for bad in found):
        return images
    manifest = replace(images.manifest, bad=dict(sorted(known.items())))
    try:
        check_max_bad(images, manifest, config.max_bad)
    except DataError as error:
        error.reported = not group.is_first
        raise
    for rank, bad in enumerate(found):
        elsewhere = [index for index in bad if any(index not in other for other in found)]
        if elsewhere and group.is_first:
            log.warning(
                "%s: %s images are bad only on %s, and not used on any rank: %s",
                images.name,
                f"{len(elsewhere):,}",
                name_ranks([rank]),
                few(elsewhere, 2, lambda i: f"{images.where(i)} ({known[i]})"),
            )
    return replace(images, manifest=manifest)


def _compare_content(
    group: Group, config: DataConfig, kind: str, images: ImageSet, advice: str
) -> None:
    indices = sample_indices(images)
    own = content_fingerprints(images, indices, workers=config.workers)
    found = group.gather(own)
    # An image that a rank cannot read just now is compared on the others.
    differing = [
        (int(index), values)
        for index, *values in zip(indices, *found, strict=True)
        if len(set(values) - {""}) > 1
    ]
    if differing:
        index, values = differing[0]
        named = describe_difference([value or "no readable file" for value in values])
        more = f" (and {len(differing) - 1:,} others)" if len(differing) > 1 else ""
        raise group.common_error(
            f"the {kind} images must be the same on all ranks: {images.where(index)}{more} has "
            f"other content: {named}; {advice}",
        )
