"""A loss in chunks tells which of its work each of them does, so that shorter rows are known to need fewer."""

import pytest
import torch
from trl.trainer import sft_trainer

from autotrain_mem.rehearsal.trace.loss_chunks import marked_chunks
from autotrain_mem.rehearsal.trace.recorder import Recorder
from autotrain_mem.types import Phase, Work

WIDTH, VOCABULARY, CHUNK = 6, 40, 4

pytestmark = pytest.mark.skipif(not hasattr(sft_trainer, "_chunk"), reason="this TRL's loss has one chunk")


def work_of(chunks: int, *, marked: bool = True) -> list[Work]:
    """A layer and TRL's loss on so many chunks of tokens, forward and backward."""
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
def test_each_chunk_computes_its_logits_twice_and_two_gradients_and_nothing_else_is_a_chunks(chunks: int) -> None:
    work = work_of(chunks)
    assert products(work, of_chunk=True) == 4 * chunks
    assert products(work, of_chunk=False) == 2, "the layer's own product, and the gradient of its weight"
    heads = [each for each in work if each.of_chunk and each.flops and each.phase is Phase.FORWARD]
    assert [each.fixed_bytes for each in heads] == [4 * VOCABULARY * WIDTH]


def test_what_chunks_do_grows_with_their_number_and_the_rest_runs_as_often() -> None:
    few, many = ({(each.phase, each.flops, each.of_chunk): each.count for each in work_of(n)} for n in (4, 8))
    assert any(of_chunk and flops for _, flops, of_chunk in few)
    assert all(many[key] == 2 * few[key] for key in few if key[2] and key[1])


def test_no_work_is_a_chunks_where_the_method_has_none() -> None:
    assert not any(each.of_chunk for each in work_of(4, marked=False))
