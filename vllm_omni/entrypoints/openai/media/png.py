"""PNG files of RGB pixels, written two to four times faster than Pillow does.

Pillow tries all filters on each row; here every row has the average filter, which for pictures of
models makes files a few percent larger. Strips of rows are filtered and packed side by side: NumPy
and zlib leave the interpreter to others meanwhile.
"""

from __future__ import annotations

import os
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
_AVERAGE: Final = 3
_CHANNELS: Final = 3
_RGB: Final = 2
_DEFLATE_HEADER: Final = b"\x78\x01"
_MIN_STRIP_BYTES: Final = 1 << 19
_MAX_STRIPS: Final = 4


def encode_png(pixels: NDArray[np.uint8]) -> bytes:
    """A file of [height, width, 3]."""
    height, width, _ = pixels.shape
    rows = np.ascontiguousarray(pixels).reshape(height, width * _CHANNELS)
    header = struct.pack(">IIBBBBB", width, height, 8, _RGB, 0, 0, 0)
    return b"".join(
        [_SIGNATURE, _chunk(b"IHDR", header), _chunk(b"IDAT", _packed(rows)), _chunk(b"IEND", b"")]
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    checksum = zlib.crc32(data, zlib.crc32(kind))
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)


def _packed(rows: NDArray[np.uint8]) -> bytes:
    """One zlib stream of all filtered rows."""
    num_strips = max(1, min(_MAX_STRIPS, os.cpu_count() or 1, rows.nbytes // _MIN_STRIP_BYTES))
    edges = [len(rows) * i // num_strips for i in range(num_strips + 1)]

    def pack(number: int) -> tuple[NDArray[np.uint8], bytes]:
        filtered = _filtered(rows, edges[number], edges[number + 1])
        # Of zlib's ways the fastest one that still packs areas of one colour.
        packer = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_RLE)
        is_last = number == num_strips - 1
        data = packer.compress(filtered.data)
        return filtered, data + packer.flush(zlib.Z_FINISH if is_last else zlib.Z_FULL_FLUSH)

    if num_strips == 1:
        strips = [pack(0)]
    else:
        with ThreadPoolExecutor(num_strips, "png") as threads:
            strips = list(threads.map(pack, range(num_strips)))
    checksum = 1
    for filtered, _ in strips:
        checksum = zlib.adler32(filtered.data, checksum)
    packed = [data for _, data in strips]
    return b"".join([_DEFLATE_HEADER, *packed, struct.pack(">I", checksum)])


def _filtered(rows: NDArray[np.uint8], first: int, last: int) -> NDArray[np.uint8]:
    """These rows, each byte less the mean of the byte of the pixel to its left and of that above;
    what is outside counts as 0."""
    own = rows[first:last]
    above = np.zeros_like(own)
    above[int(first == 0) :] = rows[max(first - 1, 0) : last - 1]
    mean = above >> 1
    left, above = own[:, :-_CHANNELS], above[:, _CHANNELS:]
    mean[:, _CHANNELS:] = (left & above) + ((left ^ above) >> 1)  # their mean without a carry
    filtered = np.empty((len(own), 1 + own.shape[1]), np.uint8)
    filtered[:, 0] = _AVERAGE
    np.subtract(own, mean, out=filtered[:, 1:])
    return filtered
