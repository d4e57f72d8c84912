"""The work of a chunked loss is assigned to its chunks, so that shorter rows count fewer chunks."""

import pytest
import torch
from trl.trainer import sft_trainer

from autotrain_mem.rehearsal.trace.loss_chunks import marked_chunks
from autotrain_mem.rehearsal.trace.recorder import Recorder
from autotrain_mem.types import Phase, Work

WIDTH, VOCABULARY, CHUNK = 6, 40, 4

pytestmark = pytest.mark.skipif(not hasattr(sft_trainer, "_chunk"), reason="this TRL's loss has one chunk")


def work_of(chunks: int, *, marked: bool = True) -> list[Work]:
    """Returns the work of a layer and TRL's loss on ``chunks`` chunks, forward and backward."""
    recorder, layer = Recorder(), torch.nn.Linear(WIDTH, WIDTH)
    head = torch.nn.Parameter(torch.zeros(VOCABULARY, WIDTH))
    labels = torch.zeros(1, chunks * CHUNK, dtype=torch.long)
    for weight in (*layer.parameters(), head):
        recorder.work.know_weight(weight)
    with recorder.recording(), marked_chunks(marked):
        recorder.enter_phase(Phase.FORWARD)
        hidden = layer(torch.ones(1, chunks * CHUNK, WIDTH))
        loss = sft_trainer._chunked_cross_entropy_loss(hidden, head, CHUNK, shift_labels=labels)[0]
        recorder.enter_phase(Phase.BACKWARD)
        loss.backward()
        recorder.work.optimizer_stepped()
    return list(recorder.work.workload().work)


def products(work: list[Work], *, of_chunk: bool) -> float:
    return sum(each.count for each in work if each.flops and each.of_chunk is of_chunk)


@pytest.mark.parametrize("chunks", [2, 7])
def test_each_chunk_computes_its_logits_twice_and_two_gradients(chunks: int) -> None:
    work = work_of(chunks)
    assert products(work, of_chunk=True) == 4 * chunks
    assert products(work, of_chunk=False) == 2, "the layer's own product, and the gradient of its weight"
    heads = [each for each in work if each.of_chunk and each.flops and each.phase is Phase.FORWARD]
    assert [each.fixed_bytes for each in heads] == [4 * VOCABULARY * WIDTH]
    assert not any(each.of_chunk for each in work_of(chunks, marked=False))
