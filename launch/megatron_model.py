"""Builds and trains tiny Megatron GPT models in any parallel layout, for the demo and for the tests.

``build(model, layout, training)`` gives a ``MegatronRun``: model chunks in Megatron's own DistributedDataParallel, its
own optimizer, a train step on given or synthetic tokens and full logits for comparison. ``destroy()`` ends the layout,
so that several layouts run one after the other in one process group. Runs on the CPU after
``launch.cpu_shim.install()``.

Needs megatron-core (0.16.1 or newer) and an initialised default process group. Imports nothing of megasync.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module

from launch.cpu_attention import zigzag_positions
from launch.megatron_setup import Layout, TinyModel, Training, optimizer_config, transformer_config


class MegatronRun:
    """A built model with its optimizer. Made by ``build``.

    Attributes:
        chunks: DistributedDataParallel model chunks of this rank, by virtual stage.
        optimizer: Megatron optimizer over all chunks.
        config: The transformer configuration.
        num_steps: Train steps done.
    """

    def __init__(self, model: TinyModel, layout: Layout, training: Training, chunks: list[Any], config: Any) -> None:
        self.model, self.layout, self.training = model, layout, training
        self.chunks, self.config = chunks, config
        self.optimizer: Any = get_megatron_optimizer(optimizer_config(training), chunks, use_gloo_process_groups=False)
        self.num_steps = 0

    def train_step(self, tokens: torch.Tensor | None = None, weights: torch.Tensor | None = None) -> float | None:
        """One optimizer step. *Collective*: every rank of the world must call it.

        Args:
            tokens: int64 ``[num_microbatches * micro_batch_size, seq_length + 1]``, whole sequences, equal on the
                ranks of one data parallel replica; None for synthetic ones.
            weights: float32 ``[num_microbatches * micro_batch_size, seq_length]``, weights of the token losses; None
                for 1 (a policy gradient has the advantages here).

        Returns:
            The mean loss on ranks of the last pipeline stage, None elsewhere.
        """
        if tokens is None:
            tokens = self._synthetic()
        if self.training.on_gpu:
            tokens = tokens.cuda()
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self._schedule(tokens, weights, forward_only=False, collect_non_loss_data=False)
        self.optimizer.step()
        self.num_steps += 1
        return float(torch.stack(losses).mean()) if losses else None

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """Full logits. *Collective*: every rank of the world must call it with the same tokens.

        Args:
            tokens: int64 ``[micro_batch_size, seq_length]``.

        Returns:
            float ``[micro_batch_size, seq_length, padded vocabulary]`` on ranks of the last stage, None elsewhere.
        """
        for chunk in self.chunks:
            chunk.eval()
        # The interleaved schedule wants at least as many micro batches as stages.
        padded = torch.cat([tokens, tokens[:, :1]], dim=1).repeat(self.layout.pp, 1)
        with self._without_mtp():
            outputs = self._schedule(padded, None, forward_only=True, collect_non_loss_data=True)
        if not outputs:
            return None
        over_vocab = _gather(outputs[0], parallel_state.get_tensor_model_parallel_group(), dim=2)
        over_sequence = _gather(over_vocab, parallel_state.get_context_parallel_group(), dim=1)
        size, length = self.layout.cp, self.training.seq_length
        order = torch.cat([zigzag_positions(r, size, length // size) for r in range(size)])
        return over_sequence[:, order.argsort()]

    def destroy(self) -> None:
        """Forget the layout. *Collective*. Another one may be built in the same process group afterwards."""
        self.chunks.clear()
        self.optimizer = None
        dist.barrier()
        parallel_state.destroy_model_parallel()

    @contextlib.contextmanager
    def _without_mtp(self) -> Iterator[None]:
        """Switch the MTP layers off: Megatron runs them wherever a model has them, and they want labels."""
        models = [_unwrap(c) for c in self.chunks]
        before = self.config.mtp_num_layers, [m.mtp_process for m in models]
        try:
            self.config.mtp_num_layers = None
            for m in models:
                m.mtp_process = False
            yield
        finally:
            self.config.mtp_num_layers = before[0]
            for m, on in zip(models, before[1], strict=True):
                m.mtp_process = on

    def _synthetic(self) -> torch.Tensor:
        """Random tokens; other ones for each step and data parallel rank."""
        rank = parallel_state.get_data_parallel_rank()
        generator = torch.Generator().manual_seed(self.training.seed + 1000 * self.num_steps + rank)
        rows = self.training.num_microbatches * self.training.micro_batch_size
        shape = (rows, self.training.seq_length + 1)
        return torch.randint(self.model.vocab_size, shape, generator=generator)

    def _schedule(
        self,
        tokens: torch.Tensor,
        weights: torch.Tensor | None,
        *,
        forward_only: bool,
        collect_non_loss_data: bool,
    ) -> list[Any]:
        """Run Megatron's schedule over the micro batches; gives what the loss function returned, on the last stage."""
        size = self.training.micro_batch_size
        whole = tokens.split(size)
        batches = list(zip(whole, weights.split(size) if weights is not None else [None] * len(whole), strict=True))
        run = get_forward_backward_func()
        forward = partial(self._forward_step, want_logits=collect_non_loss_data)
        iterators = [iter(batches) for _ in self.chunks]
        stored: list[Any] = run(
            forward_step_func=forward,
            data_iterator=iterators if len(self.chunks) > 1 else iterators[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(batches),
            seq_length=self.training.seq_length,
            micro_batch_size=size,
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
        )
        return [s for s in stored if torch.is_tensor(s)]

    def _forward_step(self, batches: Any, chunk: Any, want_logits: bool = False) -> tuple[torch.Tensor, Any]:
        whole, weights = next(batches)
        size, length = self.layout.cp, self.training.seq_length
        rank = parallel_state.get_context_parallel_rank()
        here = zigzag_positions(rank, size, length // size).to(whole.device)
        positions = here.expand(whole.shape[0], -1)
        labels = None if want_logits else whole[:, 1:][:, here]
        mask = {"loss_mask": torch.ones(positions.shape, device=whole.device)}
        extra = {} if want_logits or not self.model.num_mtp_layers else mask
        output = chunk(whole[:, :-1][:, here], positions, None, labels=labels, **extra)
        if want_logits:
            return output, _keep
        return output, partial(_mean_loss, weights=None if weights is None else weights[:, here])


def build(
    model: TinyModel,
    layout: Layout,
    training: Training,
    amend: Callable[[torch.nn.Module], None] | None = None,
    *,
    timeout_s: float = 1800.0,
) -> MegatronRun:
    """Build the chunks of this rank. *Collective*: every rank of the default group must call it with equal arguments.

    Weights depend on the seed and not on tensor parallelism; replicas are equal.

    Args:
        model: The model.
        layout: The parallel layout; its sizes must divide the world.
        training: Optimizer and batch.
        amend: Called with every chunk's GPTModel before it is wrapped, for tests that add parts of their own.
        timeout_s: Longest that a rank waits for another in Megatron's collectives.

    Returns:
        The run.
    """
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.chunks if layout.chunks > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp if model.num_experts else None,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=timeout_s / 60,
    )
    torch.manual_seed(training.seed)
    model_parallel_cuda_manual_seed(training.seed)
    config = transformer_config(model, layout, training)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=training.distributed_optimizer,
        overlap_grad_reduce=training.overlap,
        overlap_param_gather=training.overlap,
        grad_reduce_in_fp32=True,
        bucket_size=None if training.on_gpu else 4096,
    )
    chunks: list[Any] = []
    for stage in range(layout.chunks):
        gpt = _chunk(model, layout, config, stage if layout.chunks > 1 else None)
        if amend is not None:
            amend(gpt)
        if training.on_gpu:
            gpt.cuda()  # torch's own norms are made on the CPU
        wrapped = Float16Module(config, gpt) if training.bf16 else gpt
        chunks.append(DistributedDataParallel(config, ddp_config, wrapped))
        chunks[-1].broadcast_params()
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = [c.no_sync for c in chunks] if len(chunks) > 1 else chunks[0].no_sync
    return MegatronRun(model, layout, training, chunks, config)


def _chunk(model: TinyModel, layout: Layout, config: Any, stage: int | None) -> GPTModel:
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=stage)
    mtp = None
    if model.num_mtp_layers:
        mtp = get_gpt_mtp_block_spec(config, block, use_transformer_engine=False, vp_stage=stage)
    unit = model.vocab_divisor * layout.tp
    return GPTModel(
        config,
        block,
        vocab_size=-(-model.vocab_size // unit) * unit,
        max_sequence_length=4096,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        share_embeddings_and_output_weights=model.tied,
        position_embedding_type="rope",
        rotary_base=model.rotary_base,
        mtp_block_spec=mtp,
        vp_stage=stage,
    )


def _unwrap(chunk: Any) -> Any:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _mean_loss(output: torch.Tensor, weights: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    loss = (output.float() if weights is None else output.float() * weights).mean()
    # A copy: the schedule divides the loss in place.
    return loss, loss.detach().clone()


def _keep(output: torch.Tensor, non_loss_data: bool = False) -> torch.Tensor:
    return output


def _gather(local: torch.Tensor, group: Any, dim: int) -> torch.Tensor:
    parts = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(parts, local.contiguous(), group=group)
    return torch.cat(parts, dim=dim)
