set -e
cd "$FOLDER"
export HF_HUB_OFFLINE=1
"$BIN/aiperf" profile -m "$MODEL" --tokenizer "$TOKENIZER" --url "${BASE#http://}" --endpoint-type chat --streaming \
  --request-count 15 --concurrency 3 --isl 64 --osl 16 --ui none
"$BIN/python" - <<'P'
import glob
import json

[report] = glob.glob("artifacts/**/profile_export_aiperf.json", recursive=True)
told = json.load(open(report))
assert told["request_count"]["avg"] == 15, told["request_count"]
P
