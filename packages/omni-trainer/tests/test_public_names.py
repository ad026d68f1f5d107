"""What forks and scripts import from the package's top level; taking a name away breaks them."""

import omni_trainer

NAMES = [
    "ActorRolloutRefConfig",
    "ActorRolloutRefWorker",
    "CanaryError",
    "Evaluation",
    "LocalGroup",
    "RewardWorker",
    "RunConfig",
    "RunSummary",
    "ServerAdapter",
    "Trainer",
    "TrainingWorker",
    "TrainingWorkerConfig",
    "WorkerError",
    "WorkerGroup",
    "evaluate_run",
    "export_run",
    "load_run",
    "run_training",
]
MEMBERS = {
    "TrainingWorker": "reset set_loss_fn to train_mini_batch train_batch infer_batch save_checkpoint "
    "load_checkpoint copy_adapter ema_update_adapter",
    "TrainingWorkerConfig": "model engine optimizer checkpoint",
    "ActorRolloutRefWorker": "init_model infer_actor_batch infer_ref_batch update_actor update_weights "
    "save_checkpoint load_checkpoint copy_adapter ema_update_adapter",
    "ServerAdapter": "submit poll cancel update pause sleep wake resume state",
}


def test_the_public_names_are_these():
    assert sorted(set(omni_trainer.__all__) - {"__version__"}) == NAMES
    assert set(omni_trainer.__all__) <= set(dir(omni_trainer))
    for name in NAMES:
        assert getattr(omni_trainer, name) is not None


def test_they_have_the_members_that_users_know():
    for name, members in MEMBERS.items():
        for member in members.split():
            assert hasattr(getattr(omni_trainer, name), member), f"{name}.{member}"
