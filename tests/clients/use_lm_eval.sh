set -e
cd "$FOLDER"
export HF_HUB_OFFLINE=1
"$BIN/python" - <<'P'
import json
import pathlib

rows = [{"text": f"The number after {n} is", "choices": [f" {n + 1}", f" {n - 1}"], "answer": 0} for n in range(3, 9)]
pathlib.Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
pathlib.Path("next.yaml").write_text("""task: next_number
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: text
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}]
""")
pathlib.Path("write.yaml").write_text("""task: write_number
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: text
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["."], max_gen_toks: 8}
metric_list: [{metric: exact_match}]
""")
P
args="model=$MODEL,tokenizer_backend=huggingface,tokenizer=$TOKENIZER,num_concurrent=2"
"$BIN/lm_eval" run --model local-completions --model_args "$args,base_url=$BASE/v1/completions" \
  --include_path . --tasks next_number,write_number
"$BIN/lm_eval" run --model local-chat-completions --model_args "$args,base_url=$BASE/v1/chat/completions" \
  --include_path . --tasks write_number --apply_chat_template
