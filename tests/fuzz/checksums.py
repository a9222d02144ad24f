"""Right checksums for mutated files: without them, a reader would refuse nearly all at once."""

from __future__ import annotations

import struct
import zlib


def sign_tar(content: bytes) -> bytes:
    """The checksum of each header, also inside a tar in a tar."""
    out = bytearray(content)
    for start in range(0, len(out) - 511, 512):
        block = out[start : start + 512]
        if block[257:262] == b"ustar":
            block[148:156] = b" " * 8
            out[start + 148 : start + 156] = b"%06o\0 " % sum(block)
    return bytes(out)


def _table() -> list[int]:
    table = list(range(256))
    for _ in range(8):
        table = [crc >> 1 ^ 0x82F63B78 * (crc & 1) for crc in table]
    return table


_TABLE = _table()


def _masked_crc(content: bytes) -> bytes:
    crc = 2**32 - 1
    for byte in content:
        crc = _TABLE[(crc ^ byte) & 255] ^ crc >> 8
    crc ^= 2**32 - 1
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32)


def sign_tfrecord(content: bytes) -> bytes:
    """The checksums of each record: of its length, and of its content if all of it is there."""
    out, place = bytearray(content), 0
    while place + 12 <= len(out):
        (length,) = struct.unpack_from("<Q", out, place)
        out[place + 8 : place + 12] = _masked_crc(out[place : place + 8])
        end = place + 12 + length
        if end + 4 > len(out):
            break
        out[end : end + 4] = _masked_crc(out[place + 12 : end])
        place = end + 4
    return bytes(out)


def sign_png(content: bytes) -> bytes:
    """The checksum of each chunk."""
    if not content.startswith(b"\x89PNG"):
        return content
    out, place = bytearray(content), 8
    while place + 12 <= len(out):
        end = place + 8 + int.from_bytes(out[place : place + 4], "big")
        if end + 4 > len(out):
            break
        out[end : end + 4] = struct.pack(">I", zlib.crc32(out[place + 4 : end]))
        place = end + 4
    return bytes(out)


def sign_zip(content: bytes) -> bytes:
    """The checksum of each stored member that the directory lists, in both places."""
    out, place = bytearray(content), 0
    while (place := out.find(b"PK\1\2", place)) >= 0 and place + 46 <= len(out):
        size, offset = struct.unpack_from("<I18xI", out, place + 20)
        if out[offset : offset + 4] == b"PK\3\4" and offset + 30 <= len(out):
            name, extra = struct.unpack_from("<HH", out, offset + 26)
            start = offset + 30 + name + extra
            checksum = struct.pack("<I", zlib.crc32(out[start : start + size]))
            out[place + 16 : place + 20] = out[offset + 14 : offset + 18] = checksum
        place += 46
    return bytes(out)
