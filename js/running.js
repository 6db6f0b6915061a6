// Which workflow runs: the server's events name nodes alone, and another open workflow may have nodes of the same ids.
import { api } from "/scripts/api.js";
import { isOpen } from "./graph.js";

const workflows = new Map(); // of prompts that have not begun, by the prompt's id
const unanswered = new Set(); // requests to queue a prompt, which may begin before the answer
const answerListeners = [];
const isMine = (_id, about) => about?.client_id === (api.clientId ?? api.initialClientId);
let workflowNow = workflowInQueue(isMine); // of before a reload

const queuePrompt = api.queuePrompt;
api.queuePrompt = function (_number, data) {
  const answer = queuePrompt.apply(this, arguments);
  const noted = Promise.resolve(answer).then(
    (answered) => {
      workflows.set(answered?.prompt_id, data?.workflow?.id);
      return answered;
    },
    (refused) => refused.response,
  );
  noted.then((answered) => { for (const listener of answerListeners) listener(answered?.node_errors); });
  unanswered.add(noted);
  noted.then(() => unanswered.delete(noted));
  return answer;
};

// Called with what the server says of a prompt's nodes, when it has answered: nothing, or their errors by id.
export const onAnswer = (listener) => answerListeners.push(listener);

// Of the running prompt for which something holds, by its id and what was queued with it: this page may have been opened anew since.
async function workflowInQueue(holds) {
  try {
    const { queue_running: run } = await (await api.fetchApi("/queue")).json();
    return run.find(([, id, , about]) => holds(id, about))?.[3]?.extra_pnginfo?.workflow?.id;
  } catch {
    return undefined; // an older server, or none
  }
}

async function workflowOf(prompt) {
  if (!workflows.has(prompt)) await Promise.all(unanswered);
  const workflow = workflows.get(prompt) ?? (await workflowInQueue((id) => id === prompt));
  workflows.delete(prompt);
  return workflow;
}

api.addEventListener("reconnected", () => { workflowNow = workflowInQueue(isMine); });
api.addEventListener("execution_start", ({ detail }) => { workflowNow = workflowOf(detail.prompt_id); });

// Its id; none where nobody knows.
export const runningWorkflow = () => workflowNow;

// Do something if the workflow that runs, as far as it is known, is what is open.
export async function ifRunningIsOpen(act) {
  const workflow = await workflowNow;
  if (workflow == null || isOpen(workflow)) act();
}
