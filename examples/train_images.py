"""Trains a small network on JPEG and PNG files that lie somewhere else, and goes on where it was stopped.

Files are read through a cache on local storage (p2pstate.data.CachedFiles), decoded with Pillow and augmented in loader
workers; what augmentation draws is a function of seed, epoch and image. Model, optimizer and position are saved
together every --save-every steps; a next start continues, bit for bit. It runs alone, without a process group:
p2pstate.data is usable in any PyTorch program.

    pip install 'p2pstate[images,plot]'
    python train_images.py --make memory://pictures --out runs/images     # pictures cut from one that matplotlib ships
"""

import argparse
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from p2pstate.data import CachedFiles, Loader, Sampler, Shuffled

SIDE = 32  # of what the network sees, in pixels
NUM_CLASSES = 4


def make_pictures(folder: str, num_pictures: int, side: int = 96) -> list[str]:
    """Cuts squares out of a photograph that matplotlib ships and writes them to ``folder``, any fsspec URL, as JPEG and
    PNG in turns. Returns their URLs; the class of a picture is the quarter of the photograph that it comes from."""
    from matplotlib.cbook import get_sample_data

    with get_sample_data("grace_hopper.jpg") as file:
        photograph = Image.open(file).convert("RGB")
    draw = np.random.default_rng(1)
    urls = []
    for number in range(num_pictures):
        quarter = number % NUM_CLASSES
        width, height = photograph.width // 2 - side, photograph.height // 2 - side
        left = int(draw.integers(width)) + quarter % 2 * photograph.width // 2
        top = int(draw.integers(height)) + quarter // 2 * photograph.height // 2
        encoded = io.BytesIO()
        kind = ("jpeg", "png")[number % 3 == 0]
        photograph.crop((left, top, left + side, top + side)).save(encoded, kind)
        urls.append(f"{folder}/{quarter}-{number:05d}.{kind}")
        with fsspec.open(urls[-1], "wb") as out:
            out.write(encoded.getvalue())
    return urls


class Pictures(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """(pixels, class) of encoded pictures, cropped and mirrored at random."""

    def __init__(self, urls: Sequence[str], files: CachedFiles) -> None:
        self._urls, self._files = list(urls), files

    def __len__(self) -> int:
        return len(self._urls)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with self._files.open(self._urls[index]) as file:
            picture = Image.open(file).convert("RGB")
        scale = 0.5 + 0.5 * torch.rand(()).item()  # the loader seeds torch's stream for each sample
        side = max(1, int(scale * min(picture.size)))
        left = int(torch.randint(picture.width - side + 1, ()))
        top = int(torch.randint(picture.height - side + 1, ()))
        picture = picture.resize((SIDE, SIDE), Image.Resampling.BILINEAR, (left, top, left + side, top + side))
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255
        if torch.rand(()) < 0.5:
            pixels = pixels.flip(-1)
        return pixels, int(self._urls[index].rpartition("/")[2].partition("-")[0])

    def prefetch(self, indices: Sequence[int]) -> None:
        """The loader tells a worker what it is going to be asked for."""
        self._files.prefetch(self._urls[index] for index in indices)


def make_loader(pictures: Pictures, *, batch: int, epochs: int, workers: int, seed: int = 0) -> Loader:
    sampler = Sampler(Shuffled(len(pictures), seed=seed), batch)
    return Loader(pictures, batch_sampler=sampler, num_workers=workers, seed=seed, epochs=epochs)


def build_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, NUM_CLASSES)),
    )


def save(path: Path, **states: Any) -> None:
    partial = path.with_suffix(".partial")
    torch.save(states, partial)
    partial.replace(path)  # all of it, or the one before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--urls", nargs="*", default=[], help="pictures; the class is what their names begin with")
    parser.add_argument("--make", metavar="URL", help="make pictures there, and take them")
    parser.add_argument("--pictures", type=int, default=240, help="how many to make")
    parser.add_argument("--out", type=Path, required=True, help="folder for the cache and the newest state")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
    args = parser.parse_args()

    args.out.mkdir(parents=True, exist_ok=True)
    urls = [*args.urls, *(make_pictures(args.make, args.pictures) if args.make else ())]
    files = CachedFiles(args.out / "cache", max_bytes=1 << 30)
    loader = make_loader(Pictures(urls, files), batch=args.batch, epochs=args.epochs, workers=args.workers)
    network = build_network()
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    newest, step = args.out / "newest.pt", 0
    if newest.exists():
        state = torch.load(newest, weights_only=True)
        network.load_state_dict(state["network"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])
        step = state["step"]
        print(f"goes on behind step {step}")

    for pixels, classes in loader:
        loss = nn.functional.cross_entropy(network(pixels), classes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        print(f"step {step}  epoch {loader.epoch}  loss {loss.item():.4f}")
        if step % args.save_every == 0:
            states = {"network": network.state_dict(), "optimizer": optimizer.state_dict()}
            save(newest, **states, loader=loader.state_dict(), step=step)
    print(loader.stats())


if __name__ == "__main__":
    main()
