"""Settings of fastaug.pack."""

from __future__ import annotations

from dataclasses import dataclass

from fastaug.settings import Settings, setting


@dataclass(frozen=True)
class PackConfig(Settings):
    """What happens to the images, and how large the shards are."""

    max_side: int = setting(0, at_least=0)
    """Shrink an image until its SHORTER side has N pixels, if it is longer; 256 is usual for
    training at 224. 0: keep all sizes."""
    quality: int = setting(90, at_least=1, at_most=100)
    """JPEG quality of images that are shrunk. All others are copied byte for byte."""
    shard_size: int = setting(256, at_least=1)
    """MB of a shard. An image that is larger gets its own."""
    full: bool = False
    """Decode every image to find damaged ones; by default only those that are shrunk are decoded,
    and header, size and end of file of the others are checked."""
    max_bad: float = setting(0.01, at_least=0, at_most=1, free_on_resume=True)
    """Largest share of unreadable images in a split, 0 to 1; more is an error. They are left out
    and listed in bad-images.txt."""
    workers: int = setting(-1, at_least=-1, free_on_resume=True)
    """Threads; -1: four per core, up to 32, at least one per core."""
