"""Cards to compare that cannot be compared, by the name of their golden file: exit code, and what was typed."""

CASES = {
    "cards_to_train_on": (2, "sft --model tiny --gpu all --dataset data.jsonl"),
    "cards_to_estimate": (2, "estimate sft --model tiny --gpu rtx3060,rtx4090 --max_length 16"),
    "cards_unknown_name": (11, "plan sft --model tiny --gpu rtx3060,rtx309 --max_length 16"),
    "cards_length_beyond_context": (22, "plan sft --model tiny --gpu rtx3060,rtx4090 --max_length 100000"),
    "cards_batch_does_not_split": (
        40,
        "plan sft --model tiny --gpu rtx3060,rtx4090 --max_length 16 --effective_batch_size 10 "
        "--per_device_train_batch_size 4",
    ),
}
