import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const provider = createOpenAICompatible({ name: "selfspec", baseURL: process.env.BASE + "/v1" });
const model = provider(process.env.MODEL);
const whole = await generateText({ model, prompt: "Who are you?", maxOutputTokens: 20 });
let text = "";
for await (const part of streamText({ model, prompt: "Say hi.", maxOutputTokens: 20 }).textStream) text += part;
if (!whole.text || !text) throw new Error("an answer is empty");
