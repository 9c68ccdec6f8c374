set -e
cd "$FOLDER"
# It takes a tokenizer by the name of a repository alone, which the hub's cache holds here.
export HF_HUB_OFFLINE=1 HF_HUB_CACHE="$FOLDER/hub"
mkdir -p "$HF_HUB_CACHE/models--local--tokenizer/refs" "$HF_HUB_CACHE/models--local--tokenizer/snapshots"
cp -r "$TOKENIZER" "$HF_HUB_CACHE/models--local--tokenizer/snapshots/main"
printf main > "$HF_HUB_CACHE/models--local--tokenizer/refs/main"
"$BIN/aiperf" profile -m "$MODEL" --tokenizer local/tokenizer --url "${BASE#http://}" --endpoint-type chat --streaming \
  --request-count 15 --concurrency 3 --isl 64 --osl 16 --ui none
"$BIN/python" - <<'P'
import glob
import json

[report] = glob.glob("artifacts/**/profile_export_aiperf.json", recursive=True)
told = json.load(open(report))
assert told["request_count"]["avg"] == 15, told["request_count"]
P
