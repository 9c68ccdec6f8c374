set -e
export LLM_USER_PATH=$FOLDER
printf -- '- model_id: served\n  model_name: %s\n  api_base: "%s/v1"\n  supports_schema: true\n  supports_tools: true\n' "$MODEL" "$BASE" > "$FOLDER/extra-openai-models.yaml"
"$BIN/llm" keys set openai --value none
test -n "$("$BIN/llm" -m served -o max_tokens 20 'Who are you?')"
test -n "$("$BIN/llm" -m served -c --no-stream -o max_tokens 20 'And me?')"
"$BIN/llm" -m served -o temperature 0 --schema 'name, age int' 'Invent a dog' | python3 -c 'import json, sys; assert json.load(sys.stdin).keys() == {"name", "age"}'
test -n "$("$BIN/llm" -m served -o max_tokens 60 -T llm_version 'Which version is this?')"
