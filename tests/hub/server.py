"""A server with the HTTP interface of the Hugging Face Hub, with the requests that push and pull send.

Files that are not valid UTF-8 or larger than 1 KiB are kept as large files, which are downloaded through a redirect
as on the Hub.
"""

import base64
import hashlib
import json
import threading
from collections import Counter
from urllib.parse import parse_qs, unquote, urlsplit

from tests.hub.http_servers import Handler, Server
from tests.hub.lies import tell

TOKEN = "hf_valid"
PAGE = 7  # entries in a page of a listing
MAX_REGULAR_BYTES = 1024


class Hub:
    """The data sets, and the server.

    Attributes
    ----------
    commits : dict
        Files by path of each commit: (bytes, whether it is a large file).
    branches, private : dict
        Commit of each branch, and whether a data set is private, by data set.
    parents : list
        The parent that each commit request names.
    requests : Counter
        Number of requests by (method, path).
    fault : callable
        Return the status to answer a request with, given (method, path), or None.
    lie : callable
        Return a function that sends the answer to a request, given (handler, data), or None, given (method, path).
    """

    def __init__(self):
        self.commits, self.branches, self.private, self.large = {}, {}, {}, {}
        self.parents, self.requests, self.fault = [], Counter(), lambda method, path: None
        self.lie = lambda method, path: None
        self._lock = threading.Lock()
        server = Server(type("Handler", (_Handler,), {"hub": self}))
        self.url, self.close = server.url, server.close
        # As on the Hub, large files are on another host.
        self.large_url = f"http://localhost:{server.server_port}/large"

    def files(self, repo, revision="main"):
        """Return the bytes of each file of a data set by path."""
        return {path: data for path, (data, _) in self.commits[self.branches[repo][revision]].items()}

    def create(self, repo, private=False):
        """Create a data set with a file that git needs, as the Hub does."""
        self.private[repo] = private
        self.branches[repo] = {"main": self.commit({".gitattributes": (b"*.bin filter=lfs\n", False)})}

    def replace(self, repo, files):
        """Make a commit with some files replaced, or removed if they are None. For tests of untrusted data sets."""
        old = self.commits[self.branches[repo]["main"]]
        new = old | {path: (data, len(data or b"") > 64) for path, data in files.items()}
        self.branches[repo]["main"] = self.commit({p: f for p, f in new.items() if f[0] is not None})

    def commit(self, files):
        name = hashlib.sha1(f"{len(self.commits)}".encode()).hexdigest()
        self.commits[name] = files
        for data, _ in files.values():
            self.large[hashlib.sha256(data).hexdigest()] = data
        return name


def _oid(data, is_large):
    if is_large:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Handler(Handler):
    hub = None

    def answer(self, value=None, status=200, **headers):
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status, code=""):
        self.answer({"error": code or "refused"}, status, **({"X_Error_Code": code} if code else {}))

    def handle_request(self):
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        split = urlsplit(self.path)
        path, self.query = unquote(split.path), parse_qs(split.query)
        with self.hub._lock:
            self.hub.requests[self.command, path] += 1
            fault = self.hub.fault(self.command, path)
            if fault is not None:
                return self.refuse(fault)
            lie = self.hub.lie(self.command, path)
            if lie is None:
                return self.dispatch(path)
        return tell(lie, self, self.hub.large.get(path.removeprefix("/large/"), b"[]"))

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def dispatch(self, path):
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if path.startswith("/large/"):
            if self.command == "PUT":
                self.hub.large[path.removeprefix("/large/")] = self.body
                return self.answer({})
            return self.answer(self.hub.large[path.removeprefix("/large/")])
        if token not in ("", TOKEN):
            return self.refuse(401)
        if path == "/api/whoami-v2":
            return self.answer({"name": "user"}) if token else self.refuse(401)
        if path == "/api/validate-yaml":
            is_valid = "license: wrong" not in json.loads(self.body)["content"]
            return self.answer(
                {} if is_valid else {"errors": [{"message": '"license" must be one of'}]}, 200 if is_valid else 400
            )
        if path == "/api/repos/create":
            wanted = json.loads(self.body)
            repo = f"{wanted['organization'] or 'user'}/{wanted['name']}"
            if not repo.startswith("user/"):
                return self.refuse(403)
            found = repo in self.hub.branches
            if not found:
                self.hub.create(repo, wanted.get("private", False) or wanted.get("visibility") == "private")
            return self.answer({"url": f"{self.hub.url}/datasets/{repo}"}, 409 if found else 200)
        kind, *words = path.removeprefix("/api").strip("/").split("/")
        repo = "/".join(words[:2]).removesuffix(".git")
        if kind != "datasets" or repo not in self.hub.branches or (self.hub.private[repo] and not token):
            return self.refuse(401 if not token else 404, "RepoNotFound")
        return self.data_set(repo, words[2:], path.startswith("/api"))

    def data_set(self, repo, words, is_api):
        branches = self.hub.branches[repo]
        if words and words[0] == "branch":
            found = words[1] in branches
            branches.setdefault(words[1], branches["main"])
            return self.answer({}, 409 if found else 200)
        if words[:3] == ["info", "lfs", "objects"]:
            objects = [self.upload_action(wanted) for wanted in json.loads(self.body)["objects"]]
            return self.answer({"transfer": "basic", "objects": objects})
        revision = words[1] if len(words) > 1 else "main"
        commit = branches.get(revision, revision)
        if commit not in self.hub.commits:
            return self.refuse(404, "RevisionNotFound")
        files = self.hub.commits[commit]
        if is_api and (not words or words[0] == "revision"):
            return self.answer({"id": repo, "sha": commit, "private": self.hub.private[repo]})
        if is_api and words[0] == "tree":
            return self.listing(files, repo, revision)
        if is_api and words[0] == "paths-info":
            wanted = json.loads(self.body)["paths"] if self.body[:1] == b"{" else parse_qs(self.body.decode())["paths"]
            return self.answer([self.entry(p, *files[p]) for p in wanted if p in files])
        if is_api and words[0] == "preupload":
            return self.answer({"files": [self.upload_mode(files, file) for file in json.loads(self.body)["files"]]})
        if is_api and words[0] == "commit":
            return self.make_commit(repo, revision, dict(files))
        return self.resolve("/".join(words[2:]), commit, files)

    def entry(self, path, data, is_large):
        entry = {"type": "file", "path": path, "size": len(data), "oid": _oid(data, False)}
        return entry | ({"lfs": {"oid": _oid(data, True), "size": len(data), "pointerSize": 130}} if is_large else {})

    def listing(self, files, repo, revision):
        entries = [self.entry(path, *file) for path, file in sorted(files.items())]
        entries += [{"type": "directory", "path": "segments", "oid": "0" * 40}] if entries else []
        begin = int(self.query.get("cursor", ["0"])[0])
        end = begin + PAGE
        link = f'<{self.hub.url}/api/datasets/{repo}/tree/{revision}?recursive=True&cursor={end}>; rel="next"'
        return self.answer(entries[begin:end], **({"Link": link} if end < len(entries) else {}))

    def upload_mode(self, files, file):
        sample = base64.b64decode(file["sample"])
        try:
            sample.decode()
            is_large = file["size"] > MAX_REGULAR_BYTES
        except UnicodeDecodeError:
            is_large = True
        found = {"path": file["path"], "uploadMode": "lfs" if is_large else "regular", "shouldIgnore": False}
        return found | ({"oid": _oid(*files[file["path"]])} if file["path"] in files else {})

    def upload_action(self, wanted):
        found = {"oid": wanted["oid"], "size": wanted["size"]}
        if wanted["oid"] in self.hub.large:
            return found
        return found | {"actions": {"upload": {"href": f"{self.hub.url}/large/{wanted['oid']}", "header": {}}}}

    def make_commit(self, repo, revision, files):
        for line in self.body.splitlines():
            item = json.loads(line)
            key, value = item["key"], item["value"]
            if key == "header":
                self.hub.parents.append(value.get("parentCommit"))
                if self.hub.parents[-1] not in (None, self.hub.branches[repo][revision]):
                    return self.refuse(412)
            elif key == "file":
                files[value["path"]] = (base64.b64decode(value["content"]), False)
            elif key == "lfsFile":
                files[value["path"]] = (self.hub.large[value["oid"]], True)
            elif key == "deletedFile":
                del files[value["path"]]
        commit = self.hub.branches[repo][revision] = self.hub.commit(files)
        return self.answer({"commitUrl": f"{self.hub.url}/datasets/{repo}/commit/{commit}", "commitOid": commit})

    def resolve(self, path, commit, files):
        if path not in files:
            return self.refuse(404, "EntryNotFound")
        data, is_large = files[path]
        headers = {"X_Repo_Commit": commit, "ETag": f'"{_oid(data, is_large)}"'}
        if not is_large:
            return self.answer(data, **headers)
        headers |= {"X_Linked_ETag": headers["ETag"], "X_Linked_Size": str(len(data))}
        return self.answer(b"", 302, Location=f"{self.hub.large_url}/{_oid(data, True)}", **headers)
