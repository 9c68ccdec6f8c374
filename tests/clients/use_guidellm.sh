set -e
cd "$FOLDER"
export HF_HUB_OFFLINE=1
"$BIN/guidellm" run --backend "kind=openai_http,target=$BASE" --tokenizer "kind=huggingface_auto,model=$TOKENIZER" \
  --data kind=synthetic_text,prompt_tokens=64,output_tokens=16 --profile kind=constant,rate=2 \
  --constraint kind=max_requests,count=15 --disable-console --output kind=json,path=report.json
"$BIN/python" - <<'P'
import json

totals = json.load(open("report.json"))["benchmarks"][0]["metrics"]["request_totals"]
assert totals["successful"] == 15 and totals["errored"] == 0, totals
P
