"""Buckets: where tensors lie, and what a seal notices."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from xxhash import xxh3_64_intdigest

from hrl.workers.weight_sync import wire
from hrl.workers.weight_sync.wire import (
    ALIGNMENT_BYTES,
    Assembler,
    Manifest,
    WeightSyncError,
    checksum,
    copy_to_host,
    open_sealed,
    seal,
    sums_of_pieces,
    tensor_checksum,
    tensor_checksums,
)

SPECS = [
    ("embed", torch.bfloat16, (7, 5)),
    ("norm", torch.float32, (5,)),
    ("scalar", torch.bfloat16, ()),
    ("proj", torch.bfloat16, (300, 5)),
    ("bias", torch.float32, (3,)),
]


def sealed_buckets(manifest: Manifest, version: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    weights = {
        spec.name: torch.randn(spec.shape, generator=generator).to(spec.torch_dtype) for spec in manifest.tensors
    }
    data = []
    for index, bucket in enumerate(manifest.buckets):
        raw = torch.zeros(bucket.nbytes, dtype=torch.uint8)
        for piece in bucket.pieces:
            weight = weights[piece.name]
            piece.view(raw).copy_(weight if piece.is_whole else weight.reshape(-1)[piece.elements])
        seal(raw, bucket, index, version)
        data.append(raw)
    return data, weights


@settings(max_examples=50, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=12),
    bucket_bytes=st.integers(1, 4096),
)
def test_tensors_keep_their_order_do_not_overlap_and_fill_buckets_up_to_the_limit(shapes, bucket_bytes):
    specs = [(f"t{i}", torch.bfloat16 if i % 2 else torch.float32, tuple(shape)) for i, shape in enumerate(shapes)]

    manifest = Manifest.build(specs, bucket_bytes)

    assert [(t.name, getattr(torch, t.dtype), t.shape) for t in manifest.tensors] == specs
    for bucket in manifest.buckets:
        ends = [0]
        for piece in bucket.pieces:
            assert piece.offset % ALIGNMENT_BYTES == 0 and piece.offset >= ends[-1]
            ends.append(piece.offset + piece.nbytes)
        assert ends[-1] <= bucket.payload_bytes
        assert ends[-1] <= max(bucket_bytes, ALIGNMENT_BYTES)
    for spec in manifest.tensors:
        pieces = [piece for piece in manifest.pieces if piece.tensor is spec]
        ends = [piece.start + piece.nbytes for piece in pieces]
        assert [piece.start for piece in pieces] == [0, *ends[:-1]] and ends[-1] == spec.nbytes
        assert len(pieces) == 1 or spec.nbytes > bucket_bytes - ALIGNMENT_BYTES
    ends = [bucket.start + bucket.nbytes for bucket in manifest.buckets]
    assert all(bucket.start >= end for bucket, end in zip(manifest.buckets, [0, *ends[:-1]], strict=True))
    assert all(bucket.start % ALIGNMENT_BYTES == 0 for bucket in manifest.buckets)
    assert manifest.all_buckets_bytes == ends[-1]


def test_a_manifest_survives_json():
    manifest = Manifest.build(SPECS, 64, kept=["vision.weight"])

    again = Manifest.from_plain(json.loads(json.dumps(manifest.to_plain())))

    assert again == manifest and again.fingerprint == manifest.fingerprint


def test_a_name_twice_and_an_empty_list_are_refused():
    with pytest.raises(WeightSyncError, match="'norm' occurs twice"):
        Manifest.build([*SPECS, SPECS[1]], 64)
    with pytest.raises(WeightSyncError, match="empty"):
        Manifest.build([], 64)


def test_the_difference_of_two_manifests_names_missing_extra_and_changed_tensors():
    mine = Manifest.build(SPECS, 64)
    theirs = Manifest.build([SPECS[0], ("norm", torch.float32, (6,)), *SPECS[2:4], ("head", torch.bfloat16, (2,))], 64)

    assert mine.difference(theirs) == [
        "'bias' is missing",
        "'head' is extra",
        "'norm' is float32 (6,) instead of float32 (5,)",
    ]


def test_a_sealed_bucket_gives_back_exactly_what_was_written():
    manifest = Manifest.build(SPECS, 200)
    data, weights = sealed_buckets(manifest, version=3)

    assembler, opened, checksums = Assembler(), [], []
    for i, (bucket, raw) in enumerate(zip(manifest.buckets, data, strict=True)):
        checksums += open_sealed(raw, bucket, i, 3)
        opened += assembler.join(bucket, raw)

    flat = [weights[piece.name].reshape(-1)[piece.elements] for piece in manifest.pieces]
    assert checksums == tensor_checksums(flat, torch.device("cpu"))
    on_a_gpu = [checksum(p.words(data[i])) for i, bucket in enumerate(manifest.buckets) for p in bucket.pieces]
    assert on_a_gpu == [tensor_checksum(piece) for piece in flat]
    assert len(manifest.buckets) > 1 and len(manifest.pieces) > len(SPECS)
    assert [name for name, _ in opened] == [name for name, _, _ in SPECS]
    for name, tensor in opened:
        assert torch.equal(tensor, weights[name]) and tensor.dtype == weights[name].dtype


@pytest.mark.parametrize("name", [name for name, _, _ in SPECS])
def test_one_flipped_bit_names_the_tensor(name):
    manifest = Manifest.build(SPECS, 1 << 20)
    (raw,), _ = sealed_buckets(manifest, version=1)
    spec = next(piece for piece in manifest.pieces if piece.name == name)

    for byte in (0, spec.nbytes - 1):
        raw[spec.offset + byte] ^= 0x80
        with pytest.raises(WeightSyncError, match=f"'{name}'"):
            open_sealed(raw, manifest.buckets[0], 0, 1)
        raw[spec.offset + byte] ^= 0x80
    open_sealed(raw, manifest.buckets[0], 0, 1)


def test_one_flipped_bit_in_the_middle_piece_of_a_cut_tensor_names_it():
    manifest = Manifest.build(SPECS, 1024)
    data, _ = sealed_buckets(manifest, version=1)
    index, piece = next(
        (index, piece)
        for index, bucket in enumerate(manifest.buckets)
        for piece in bucket.pieces
        if piece.start and not piece.is_last
    )

    data[index][piece.offset + 5] ^= 1

    with pytest.raises(WeightSyncError, match="checksum of 'proj' differs"):
        open_sealed(data[index], manifest.buckets[index], index, 1)


def test_a_cut_tensor_begins_a_bucket_and_no_buffer_is_larger_than_asked_for():
    manifest = Manifest.build(SPECS, 1024)  # `proj` has 3000 bytes

    pieces = [(piece.start, piece.offset, piece.nbytes) for piece in manifest.pieces if piece.name == "proj"]

    assert pieces == [(0, 0, 1024), (1024, 0, 1024), (2048, 0, 952)]
    assert manifest.buckets[-1].pieces[-1].name == "bias"  # what is left of the last bucket is used
    assert manifest.largest_bucket_bytes <= 1024 + 8 * 3 + 8 * 3
    assert manifest.nbytes == 7 * 5 * 2 + 5 * 4 + 2 + 300 * 5 * 2 + 3 * 4


def test_another_version_another_bucket_and_an_unwritten_one_are_refused():
    manifest = Manifest.build(SPECS, 200)
    data, _ = sealed_buckets(manifest, version=3)

    with pytest.raises(WeightSyncError, match="bucket 0 of version 4, found bucket 0 of version 3"):
        open_sealed(data[0], manifest.buckets[0], 0, 4)
    with pytest.raises(WeightSyncError, match="expected bucket 1 of version 3, found bucket 0"):
        open_sealed(data[0], manifest.buckets[0], 1, 3)
    with pytest.raises(WeightSyncError, match="was not written"):
        open_sealed(torch.zeros_like(data[0]), manifest.buckets[0], 0, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (300, 400), (700, 1100)])
def test_what_is_copied_into_a_bucket_has_the_checksum_of_what_was_written(shape, dtype):
    source = torch.randn(shape).to(dtype)
    data = torch.zeros(source.numel() * 2 + 4, dtype=torch.uint8)
    place = data[2 : 2 + source.numel() * 2].view(torch.bfloat16).view(shape)

    found = copy_to_host(source, place, memoryview(data.numpy())[2 : 2 + source.numel() * 2])

    assert torch.equal(place, source.bfloat16()) and not data[:2].any() and not data[-2:].any()
    assert found == xxh3_64_intdigest(data[2:-2].numpy())


def test_what_another_writes_into_a_large_piece_meanwhile_is_noticed(monkeypatch):
    source = torch.randn(1 << 20)
    place = torch.zeros_like(source)
    written = memoryview(place.numpy()).cast("B")
    copyto = np.copyto

    def disturbed(target, taken):
        copyto(target, taken)
        target[7] ^= 1

    monkeypatch.setattr("hrl.workers.weight_sync.wire.np.copyto", disturbed)

    assert copy_to_host(source, place, written) == xxh3_64_intdigest(written)
    assert not torch.equal(place, source)


@pytest.mark.parametrize("sizes", [(1 << 22,) * 5, (1 << 24, 1, 0), (3, 1 << 24), (1 << 25,), (0, 0), ()])
def test_checksums_of_much_are_those_of_each_tensor_in_order(sizes):
    tensors = [torch.full((size,), number + 1, dtype=torch.uint8) for number, size in enumerate(sizes)]

    found = tensor_checksums(tensors, torch.device("cpu"))

    assert [digest % (1 << 64) for digest in found] == [xxh3_64_intdigest(tensor.numpy()) for tensor in tensors]


@settings(max_examples=30, deadline=None)
@given(size=st.integers(1, 300_000), position=st.integers(0), bit=st.integers(0, 63), seed=st.integers(0, 2**31))
def test_the_checksum_changes_with_any_single_bit(size, position, bit, seed):
    words = torch.randint(-(2**63), 2**63 - 1, (size,), generator=torch.Generator().manual_seed(seed))
    before = int(checksum(words))

    words[position % size] ^= -(2**63) if bit == 63 else 1 << bit

    assert int(checksum(words)) != before


@settings(max_examples=30, deadline=None)
@given(
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
    count=st.integers(1, 40_000),
    every=st.integers(1, 5),
    first=st.integers(0, 4),
    rows=st.sampled_from([1, 2, 7]),
    constant=st.booleans(),
)
def test_the_checksum_sees_flipped_signs_however_many(dtype, count, every, first, rows, constant):
    row = torch.ones(count) if constant else torch.randn(count, generator=torch.Generator().manual_seed(count))
    weight = row.to(dtype).repeat(rows, 1)
    negated = weight.clone()
    negated[:, first % count :: every] *= -1

    assert int(tensor_checksum(negated)) != int(tensor_checksum(weight))
    assert int(tensor_checksum(weight)) == int(tensor_checksum(weight.clone()))


@settings(max_examples=50, deadline=None)
@given(
    word=st.integers(0, 2**64 - 1),
    flipped=st.one_of(st.integers(0, 63).map(lambda bit: 1 << bit), st.integers(1, 2**64 - 1), st.just(2**64 - 1)),
    tall=st.integers(1, 5),
    wide=st.integers(1, 8191),
    place=st.integers(0, 8192 * 6 - 1),
)
def test_the_checksum_sees_changes_that_add_up_to_nothing_in_rows_and_columns(word, flipped, tall, wide, place):
    top, left = place // 8192 % (6 - tall), place % (8192 - wide)
    corners = [top, top, top + tall, top + tall], [left, left + wide] * 2
    one, other = torch.from_numpy(np.array([word, word ^ flipped], dtype=np.uint64).view(np.int64))
    patterns = [[0, 1, 1, 0], [1, 0, 0, 1], [0, 0, 1, 1], [1, 1, 0, 0], [0, 1, 0, 1], [1, 0, 1, 0], [0] * 4, [1] * 4]
    if 2 * (other - one) != 0:  # a difference in the top bit alone is its own opposite
        patterns.append([1, -1, -1, 1])

    found = set()
    for pattern in patterns:
        matrix = torch.full((6, 8192), int(one))
        matrix[corners] += (other - one) * torch.tensor(pattern)  # modulo 2**64
        found.add(int(checksum(matrix.view(-1))))

    assert len(found) == len(patterns)


def test_the_checksum_sees_swapped_words_rows_and_a_transposed_matrix():
    words = torch.arange(8192 * 6, dtype=torch.int64) ** 3
    matrix = words.view(6, 8192)
    original = int(checksum(words))

    swapped = words.clone()
    swapped[[3, 40_000]] = swapped[[40_000, 3]]

    assert int(checksum(swapped)) != original
    assert int(checksum(matrix.flip(0).contiguous().view(-1))) != original
    assert int(checksum(matrix.t().contiguous().view(-1))) != original


@pytest.mark.gpu
def test_a_checksum_is_the_same_on_every_device():
    for size in (1, 8191, 8192 * 300 + 5):
        words = torch.randint(-(2**63), 2**63 - 1, (size,), generator=torch.Generator().manual_seed(size))

        assert int(checksum(words.cuda())) == int(checksum(words))


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(
        st.tuples(st.sampled_from([0, 1, 5, 400, 8192 * 4, 8192 * 12 + 3]), st.integers(1, 3)), min_size=1, max_size=6
    ),
    bucket_bytes=st.sampled_from([1 << 12, 1 << 18, 1 << 24]),
    rows_at_once=st.sampled_from([1, 2, 256]),
)
def test_pieces_that_are_summed_together_have_the_checksums_of_each(sizes, bucket_bytes, rows_at_once):
    counts = [count for count, times in sizes for _ in range(times)]
    manifest = Manifest.build([(f"t{i}", torch.bfloat16, (n,)) for i, n in enumerate(counts)], bucket_bytes)
    generator = torch.Generator().manual_seed(len(counts))
    for bucket in manifest.buckets:
        data = torch.randint(256, (bucket.nbytes,), generator=generator, dtype=torch.uint8)
        want = [int(checksum(piece.words(data))) for piece in bucket.pieces]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(wire, "_ROWS_AT_ONCE", rows_at_once)
            assert sums_of_pieces(data, bucket).tolist() == want


def test_equal_tensors_take_as_many_operations_together_as_one_alone():
    def operations(count: int) -> int:
        bucket = Manifest.build([(f"t{i}", torch.bfloat16, (40_000,)) for i in range(count)], 1 << 30).buckets[0]
        data, seen = torch.zeros(bucket.nbytes, dtype=torch.uint8), []

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                seen.append(function)
                return function(*args, **(kwargs or {}))

        sums_of_pieces(data, bucket)  # makes the weights
        with Watch():
            sums_of_pieces(data, bucket)
        return len(seen)

    assert operations(50) == operations(1)
