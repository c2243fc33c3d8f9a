"""Text from a checkpoint, through our own model: the whole context is computed anew for each token."""

from pathlib import Path

import torch
from torch import Tensor

from fmengine.checkpoint.find import resolve, run_of, verify
from fmengine.checkpoint.manifest import ENGINE
from fmengine.checkpoint.reader import open_state
from fmengine.config.model import ModelConfig
from fmengine.data.tokenizer import end_of_document, load_tokenizer
from fmengine.errors import UserError
from fmengine.kernels.attention import dense_attention
from fmengine.models.base import CausalLM
from fmengine.models.registry import build
from fmengine.models.weights import WeightSource, load_weights


def generate(
    checkpoint_or_run: Path,
    prompt: str,
    max_new_tokens: int = 64,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
) -> str:
    """Continue a prompt with a checkpoint's model, in float32, on a GPU where there is one.

    Args:
        checkpoint_or_run: a checkpoint, or a run folder for its newest whole one.
        prompt: text to continue; empty: a new document.
        max_new_tokens: tokens to add at most; the end of the document ends it.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw from the k likeliest tokens only; 0: from all.
        seed: fixes what is drawn.

    Returns:
        The prompt and what follows it.

    Raises:
        UserError: there is no whole checkpoint or no tokenizer in its run, or the prompt does not fit the model.
    """
    checkpoint = resolve(checkpoint_or_run)
    folder = run_of(checkpoint) / "tokenizer"
    tokenizer = load_tokenizer(folder)
    _, end = end_of_document(tokenizer, folder)
    manifest = verify(checkpoint, full=False)
    model = load_model(manifest.model, open_state(checkpoint / ENGINE, manifest).weight)
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids or [end]
    if too_large := [number for number in ids if number >= (manifest.model.vocab_size or 0)]:
        raise UserError(f"{folder}: token {too_large[0]} of the prompt is beyond the model's vocabulary; check the run")
    added = sample(model, ids, max_new_tokens, temperature=temperature, top_k=top_k, seed=seed, end=end)
    return prompt + str(tokenizer.decode(added))


def load_model(config: ModelConfig, weights: WeightSource) -> CausalLM:
    """The flat model in float32, filled, on a GPU where there is one."""
    model = build(config, attention=dense_attention(mask_documents=False)).float().eval()
    load_weights(model, weights)
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


@torch.no_grad()
def sample(
    model: CausalLM, ids: list[int], count: int, *, temperature: float, top_k: int, seed: int, end: int | None
) -> list[int]:
    """Draw tokens one after another.

    Args:
        model: in evaluation mode.
        ids: the context, at least one token; of a longer one than the model's the end is used.
        count: how many to draw at most.
        temperature: as in `generate`.
        top_k: as in `generate`.
        seed: as in `generate`.
        end: token that ends the drawing and is not returned; None: nothing does.

    Returns:
        The drawn token ids, without the context.
    """
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    longest = model.config.max_position_embeddings or len(ids) + count
    drawn: list[int] = []
    for _ in range(count):
        context = torch.tensor([(ids + drawn)[-longest:]], device=device)
        length = context.shape[1]
        bounds = torch.tensor([0, length], dtype=torch.int32, device=device)
        logits = model(context, torch.arange(length, device=device)[None], bounds)[0, -1].float().cpu()
        token = _draw(logits, temperature, top_k, generator)
        if token == end:
            break
        drawn.append(token)
    return drawn


def _draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """One token id from logits [V]."""
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    probabilities = torch.softmax(logits / temperature, dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))
