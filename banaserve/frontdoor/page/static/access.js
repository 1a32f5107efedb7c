// What opens the admin API for this tab: a token that the server gives for a code or for the key.
// The token is kept, in this tab, so that the page can be loaded again; it ends with the server.
// Its name has the path in it: servers behind one proxy have one origin.
const NAME = `banaserve ${location.pathname}`;
const API_KEY = `${NAME} API key`;

// Storage that a browser's user has switched off throws.
function storage(use) {
  try { return use(sessionStorage); } catch (error) { return null; }
}

export const keptToken = () => storage((tab) => tab.getItem(NAME)) || "";
export const forgetToken = () => storage((tab) => tab.removeItem(NAME));

// The token does not open /v1: where that needs a key, the chat box asks for it. An empty one is forgotten.
export const keptApiKey = () => storage((tab) => tab.getItem(API_KEY)) || "";
export const keepApiKey = (key) => storage((tab) => (key ? tab.setItem(API_KEY, key) : tab.removeItem(API_KEY)));

const bearer = (credential) => ({ cache: "no-store", headers: { Authorization: `Bearer ${credential}` } });

// The code of a link, which is taken out of the address and the history.
export function codeOfLink() {
  const found = /^#code=([\w-]+)$/.exec(location.hash);
  if (found) history.replaceState(null, "", location.pathname);
  return found ? found[1] : "";
}

// A token for a code or for the key; empty where the server gives none.
export async function getToken(credential) {
  try {
    const answer = await fetch("../admin/page-token", { method: "POST", ...bearer(credential) });
    if (!answer.ok) return "";
    const { token } = await answer.json();
    storage((tab) => tab.setItem(NAME, token));
    return token;
  } catch (error) {
    return "";
  }
}

// Nothing stays in the tab, and its token opens nothing any more, wherever else it may be.
export async function endToken() {
  const token = keptToken();
  forgetToken();
  keepApiKey("");
  if (token) await fetch("../admin/page-token", { method: "DELETE", ...bearer(token) }).catch(() => {});
}
