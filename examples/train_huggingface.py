"""Trains a small language model with Hugging Face's Trainer, and survives: run it under p2prun (docs/trainers.md).

Batches are accumulated; the Trainer evaluates, saves, and loads the best model at the end, as it always does. What this
leaves in --out is for comparing runs (outcome.py).
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

import p2pstate
from counting_data import Counting
from outcome import save_final_state
from p2pstate.integrations.huggingface import ReplicatedTrainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, required=True, help="folder for the final state")
    args = parser.parse_args()

    p2pstate.init_process_group()  # before TrainingArguments, which would make another one
    set_seed(1)
    model = GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=32, vocab_size=64, bos_token_id=0, eos_token_id=0)
    )
    training = TrainingArguments(
        output_dir=str(args.out / "trainer"),
        use_cpu=True,
        max_steps=args.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        warmup_steps=4,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=6,
        save_strategy="steps",
        save_steps=6,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = ReplicatedTrainer(
        model=model,
        args=training,
        train_dataset=Counting(240, 24),
        eval_dataset=Counting(64, 24),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=20)],
    )
    set_seed(1000 + dist.get_rank())  # dropout differs from rank to rank
    result = trainer.train()
    figures = {"loss": result.training_loss, "best": trainer.state.best_metric, "at": trainer.state.best_global_step}
    found = nn.ParameterDict({name: torch.tensor(float(value)) for name, value in figures.items()})
    optimizer = trainer.optimizer.optimizer
    save_final_state(args.out, dist.get_rank(), nn.ModuleList([trainer.model, found]), optimizer, trainer.lr_scheduler)


if __name__ == "__main__":
    main()
