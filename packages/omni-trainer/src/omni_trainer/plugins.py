"""The trainer's own plugins. Imports no torch."""

from __future__ import annotations

from omni_core.plugins import Plugin
from omni_core.recipe import NoOptions
from omni_trainer.reporting.options import MLflowOptions, WandbOptions
from omni_trainer.rewards.options import (
    HTTPRewardConfig,
    JPEGRewardConfig,
    OCRRewardConfig,
    PickScoreRewardConfig,
    PythonRewardConfig,
    WeightedRewardConfig,
)

ocr = Plugin(
    api=1,
    options=OCRRewardConfig,
    target="omni_trainer.rewards.ocr:OCRReward",
    summary="whether a picture shows the text that its prompt puts in quotes (RapidOCR)",
)

http = Plugin(
    api=1,
    options=HTTPRewardConfig,
    target="omni_trainer.rewards.http:HTTPReward",
    summary="what a server answers to pictures and prompts in JSON",
)

jpeg_compressibility = Plugin(
    api=1,
    options=JPEGRewardConfig,
    target="omni_trainer.rewards.jpeg:JPEGReward",
    summary="how small (or large) a picture is as a JPEG file, in kB",
)

pickscore = Plugin(
    api=1,
    options=PickScoreRewardConfig,
    target="omni_trainer.rewards.pickscore:PickScoreReward",
    summary="how well a picture fits its prompt by a CLIP model of human preference (PickScore)",
)

python = Plugin(
    api=1,
    options=PythonRewardConfig,
    target="omni_trainer.rewards.python_file:PythonReward",
    summary="a function of your own in a file: score(images, prompts, metadata)",
)

weighted = Plugin(
    api=1,
    options=WeightedRewardConfig,
    target="omni_trainer.rewards.weighted:WeightedReward",
    summary="the weighted sum of several rewards, each reported by itself",
)

jsonl = Plugin(
    api=1,
    options=NoOptions,
    target="omni_trainer.reporting.jsonl:JsonlTracker",
    summary="metrics.jsonl in the run directory: one line a step",
)

tensorboard = Plugin(
    api=1,
    options=NoOptions,
    target="omni_trainer.reporting.tensorboard:TensorBoardTracker",
    summary="event files in tensorboard/ of the run directory, with the picture grids",
)

wandb = Plugin(
    api=1,
    options=WandbOptions,
    target="omni_trainer.reporting.wandb:WandbTracker",
    summary="Weights & Biases, online or offline (extra: omni-trainer[wandb])",
)

mlflow = Plugin(
    api=1,
    options=MLflowOptions,
    target="omni_trainer.reporting.mlflow:MLflowTracker",
    summary="an MLflow tracking server (extra: omni-trainer[mlflow])",
)
