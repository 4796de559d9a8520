"""The vocoder as a model of the one-shot engine: codes in frames, 24 kHz out, state between chunks.

Requests whose chunks have the same number of frames share a forward. Their states lie in the rows
of one table for each layer, so a forward takes and leaves them in one go whoever takes part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from vllm_omni.generation.model import ModelContext, Work
from vllm_omni.model_executor.models.common.code_stream import END_OF_CODES, Chunk, CodeBuffer
from vllm_omni.model_executor.models.common.part_weights import load_part
from vllm_omni.model_executor.models.common.state_table import StateTable
from vllm_omni.model_executor.models.common.vocoder import (
    Samples,
    VocoderOptions,
    audio_of,
    check_codes,
    read_part_config,
    speech_params,
)
from vllm_omni.model_executor.models.qwen3_omni.code2wav_stream import States, StreamingCode2Wav
from vllm_omni.outputs.media import AudioChunk
from vllm_omni.platforms.graphs import BatchGraphs

MAX_RECORDED_BATCH: Final = 16
"""Requests in a forward; more take several. Every recorded batch size keeps its own copy of the
states, and what is not recorded is many small kernels."""


@dataclass(slots=True, eq=False)
class Utterance:
    """One request."""

    buffer: CodeBuffer = field(default_factory=CodeBuffer)
    position: int = 0
    """Frames decoded."""
    row: int | None = None
    """Where its states lie; None before the first chunk."""


@dataclass(slots=True)
class _Turn:
    """One request in one forward. Becomes the request's state only when all of it has worked."""

    state: Utterance
    chunks: list[Chunk]
    buffer: CodeBuffer
    position: int
    samples: list[Samples] = field(default_factory=list)
    new: tuple[States, int] | None = None
    """States after the chunk, and this request's index in them."""


class Code2Wav:
    """Implements `OneShotModel`."""

    def __init__(self, context: ModelContext) -> None:
        torch.set_num_threads(context.num_threads)
        options = VocoderOptions.read(context)
        self._ramp = options.ramp
        self._device = options.device
        self._config = read_part_config(context.model_dir, "code2wav_config")
        self._config._attn_implementation = "sdpa"
        model = load_part(
            lambda: Qwen3OmniMoeCode2Wav(self._config),
            context.model_dir,
            "code2wav.",
            dtype=options.dtype,
            device=options.device,
            random=options.has_random_weights,
        )
        self._samples_per_frame = int(model.total_upsample)
        self._decoder = StreamingCode2Wav(model)
        self._dtype = options.dtype
        self.states = StateTable(self._decoder.state_shapes, options.dtype, options.device)
        with torch.inference_mode():
            self._forwards = self._record()

    def self_test(self) -> None:
        """Speak until every size of chunk had its turn, as requests will."""
        state = Utterance()
        for size in (*self._ramp.sizes, self._ramp.sizes[-1]):
            codes = np.zeros((size, self._config.num_quantizers), dtype=np.int32)
            (result,) = self.forward([Work(state, codes, is_last=False)])
            if not isinstance(result, AudioChunk):
                raise RuntimeError(f"the vocoder gave no sound in its self-test: {result!r}")
        self.finish(state)

    def start(self, prompt: object, params: object) -> tuple[object, list[object]]:
        speech_params(prompt, params)
        return Utterance(), []

    def forward(self, batch: Sequence[Work]) -> Sequence[AudioChunk | BaseException | None]:
        turns = [self._turn(work) for work in batch]
        with torch.inference_mode():
            self._run([turn for turn in turns if isinstance(turn, _Turn)])
        return [self._commit(turn) if isinstance(turn, _Turn) else turn for turn in turns]

    def finish(self, state: object) -> None:
        row = cast(Utterance, state).row
        if row is not None:
            self.states.free(row)

    def _record(self) -> Mapping[tuple[int, bool], BatchGraphs]:
        """The forward for each size that chunks have, as the first of a request or a later one;
        recorded where the device can."""
        first, *later = self._ramp.sizes
        kinds = {(first, True), *((size, False) for size in (later or [first]))}
        forwards = {kind: BatchGraphs(self._decode_tensors) for kind in kinds}
        groups, shapes = self._config.num_quantizers, self._decoder.state_shapes
        for (size, is_first), forward in forwards.items():

            def example(batch: int, size: int = size, is_first: bool = is_first) -> Any:
                codes = torch.zeros(batch, groups, size, dtype=torch.long, device=self._device)
                position = torch.zeros(batch, dtype=torch.long, device=self._device)
                past = [
                    torch.zeros(batch, *shape, dtype=self._dtype, device=self._device)
                    for shape in (() if is_first else shapes)
                ]
                return (codes, position, *past)

            forward.capture(MAX_RECORDED_BATCH, example)
        return forwards

    def _decode_tensors(
        self, codes_BGF: Tensor, position_B: Tensor, *past: Tensor
    ) -> tuple[Tensor, ...]:
        wave_BS, new = self._decoder.decode(codes_BGF, list(past) or None, position_B)
        return (wave_BS, *new)

    def _turn(self, work: Work) -> _Turn | ValueError:
        state = cast(Utterance, work.state)
        try:
            if work.item is not END_OF_CODES:
                codes = cast("np.ndarray[tuple[int, int], np.dtype[np.int32]]", work.item)
                check_codes(codes, self._config.num_quantizers, self._config.codebook_size)
        except ValueError as error:
            return error
        chunks, buffer = state.buffer.take(work.item, self._ramp)
        return _Turn(state, chunks, buffer, state.position)

    def _run(self, turns: Sequence[_Turn]) -> None:
        """Decode the chunks of every turn. The table changes only after all of them worked."""
        for nth in range(max((len(turn.chunks) for turn in turns), default=0)):
            groups: defaultdict[tuple[int, bool], list[_Turn]] = defaultdict(list)
            for turn in turns:
                if nth < len(turn.chunks):
                    groups[turn.chunks[nth].size, turn.position == 0].append(turn)
            for (size, is_first), group in groups.items():
                for i in range(0, len(group), MAX_RECORDED_BATCH):
                    part = group[i : i + MAX_RECORDED_BATCH]
                    self._decode(part, nth, size, None if is_first else self._past(part))
        self._keep(turns)

    def _past(self, group: Sequence[_Turn]) -> States:
        if all(turn.new is None for turn in group):
            return self.states.read([cast(int, turn.state.row) for turn in group])
        # A request with several chunks in one forward goes on from the one before.
        rows = [
            [state[turn.new[1]] for state in turn.new[0]]
            if turn.new is not None
            else [state[0] for state in self.states.read([cast(int, turn.state.row)])]
            for turn in group
        ]
        return [torch.stack(states) for states in zip(*rows, strict=True)]

    def _decode(self, group: Sequence[_Turn], nth: int, size: int, past: States | None) -> None:
        chunks = [turn.chunks[nth] for turn in group]
        # The last chunk is filled up to the usual size: what follows a frame does not change it.
        codes = np.zeros((len(group), size, self._config.num_quantizers), dtype=np.int64)
        for row, chunk in zip(codes, chunks, strict=True):
            row[: chunk.num_new] = chunk.codes
        codes_BGF = torch.from_numpy(codes).to(self._device).transpose(1, 2)
        position_B = torch.tensor([turn.position for turn in group], device=self._device)
        forward = self._forwards.get((size, past is None), self._decode_tensors)
        wave_BS, *new = forward(codes_BGF, position_B, *(past or ()))
        waves: Samples = wave_BS.float().cpu().numpy()
        if self._device.type != "cpu":
            # What a recorded forward gave is overwritten by its next call.
            new = [state.clone() for state in new]
        for i, (turn, chunk) in enumerate(zip(group, chunks, strict=True)):
            missing = (size - chunk.num_new) * self._samples_per_frame
            turn.samples.append(waves[i, : max(0, waves.shape[1] - missing)])
            turn.position += chunk.num_new
            turn.new = new, i

    def _keep(self, turns: Sequence[_Turn]) -> None:
        """Write what each request has to remember. Whatever takes memory comes before it."""
        by_forward: defaultdict[int, list[tuple[int, States, int]]] = defaultdict(list)
        for turn in turns:
            if turn.new is None:
                continue
            if turn.state.row is None:
                turn.state.row = self.states.allocate()
            states, index = turn.new
            by_forward[id(states)].append((turn.state.row, states, index))
        updates = []
        for group in by_forward.values():
            rows, (states, *_), which = zip(*group, strict=True)
            chosen = torch.tensor(which, device=self._device)
            updates.append((rows, [state.index_select(0, chosen) for state in states]))
        for rows, states in updates:
            self.states.write(rows, states)

    def _commit(self, turn: _Turn) -> AudioChunk | BaseException | None:
        turn.state.buffer, turn.state.position = turn.buffer, turn.position
        return audio_of(turn.samples)
