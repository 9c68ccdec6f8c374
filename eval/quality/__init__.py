"""Quality beside speed: GSM8K, HumanEval and lm-evaluation-harness, to show that speculation changes nothing."""
