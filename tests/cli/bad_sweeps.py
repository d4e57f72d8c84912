"""Sweeps that are refused, by the name of their golden file: exit code, and what was typed."""

SWEEP = "estimate sft --model tiny --gpu 300MiB --max_steps 2 --sweep"

CASES = {
    "sweep_unknown_name": (2, f"{SWEEP} max_lenght=4,32"),
    "sweep_unknown_flag_beside_it": (2, f"{SWEEP} max_length=4,32 --learning-rat 1e-4"),
    "sweep_no_values": (2, f"{SWEEP} max_length"),
    "sweep_empty_value": (2, f"{SWEEP} max_length=4,,32"),
    "sweep_no_name": (2, f"{SWEEP} =4,32"),
    "sweep_nothing": (2, SWEEP),
    "sweep_wrong_types": (
        2,
        f"{SWEEP} max_length=4,abc --sweep gradient_checkpointing=true,maybe --sweep optimizer_offload=1",
    ),
    "sweep_wrong_choice": (2, f"{SWEEP} packing_strategy=bfd,bfdd"),
    "sweep_ours_of_wrong_type": (2, f"{SWEEP} effective_batch_size=4,x --sweep headroom=8%,some"),
    "sweep_unknown_gpu": (11, "estimate sft --model tiny --max_length 16 --sweep gpu=rtx3060,rtx309"),
    "sweep_twice": (2, f"{SWEEP} max_length=4,32 --sweep max-length=64"),
    "sweep_given": (2, f"{SWEEP} max_length=4,32 --max-length 64"),
    "sweep_two_mistakes": (2, f"{SWEEP} max_steps=4,32 --sweep max_length="),
    "sweep_model_by_two_names": (2, f"{SWEEP} model_name_or_path=tiny,other"),
    "sweep_not_of_an_estimate": (2, f"{SWEEP} fit=all,lossless"),
    "sweep_too_many": (
        2,
        f"{SWEEP} max_length={','.join(map(str, range(1, 30)))} --sweep seed=1,2,3,4,5,6,7,8,9 --sweep lora_r=8,16",
    ),
    "sweep_snapshot": (2, f"{SWEEP} max_length=4,32 --snapshot run.pickle"),
    "sweep_csv_and_json": (2, f"{SWEEP} max_length=4,32 --csv --json"),
    "sweep_all_refused": (22, f"{SWEEP} max_length=100000,200000"),
    "sweep_of_a_plan": (2, "plan sft --model tiny --gpu 300MiB --sweep max_length=4,32"),
    "csv_of_a_plan": (2, "plan sft --model tiny --gpu 300MiB --csv"),
}
