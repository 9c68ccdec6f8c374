import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.BASE + "/v1", apiKey: "none" });
const messages = [{ role: "user", content: "Who are you?" }];
const done = await client.chat.completions.create({ model: process.env.MODEL, messages, max_tokens: 20 });
let text = "";
for await (const part of await client.chat.completions.create({ model: process.env.MODEL, messages, max_tokens: 20, stream: true }))
  text += part.choices[0]?.delta?.content ?? "";
const response = await client.responses.create({ model: process.env.MODEL, input: "Say hi.", max_output_tokens: 20 });
if (!done.choices[0].message.content || !text || !response.output_text) throw new Error("an answer is empty");
