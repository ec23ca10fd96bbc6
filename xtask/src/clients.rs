//! `cargo xtask clients`: checks that the OpenAPI document is valid and that clients
//! generated from it work.
//!
//! Generates a Python client and TypeScript types from `docs/openapi.json`, checks their
//! types, and uses them to enqueue, list, lease and settle jobs on the real server. The
//! programs and the versions of the generators are in `xtask/clients/`.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use crate::{
    npm::Packages,
    python::Environment,
    run::{Result, step, target_dir, took, workspace},
    server::{self, Server, TestDatabase},
    tools,
};

/// `cargo xtask clients`.
pub(crate) fn clients() -> Result {
    tools::require("clients")?;
    let python = Environment::with("clients", &folder().join("python/requirements.txt"))?;
    let node = Node::install()?;
    server::build()?;
    let home = target_dir().join("clients");
    fs::create_dir_all(&home)?;
    let _ = fs::remove_file(home.join("queue.db"));
    let started = Instant::now();
    let server = Server::start(TestDatabase::file(&home), &home)?;
    test_python(&python, &server, &home.join("python"))?;
    node.test(&server)?;
    server.stop()?;
    eprintln!("    clients: ok, {}", took(started.elapsed()));
    Ok(())
}

/// The folder with the programs and the versions of the generators.
fn folder() -> PathBuf {
    workspace().join("xtask/clients")
}

fn document() -> PathBuf {
    workspace().join("docs/openapi.json")
}

/// Adds the address and the token of the server to a command.
fn against<'c>(server: &Server, command: &'c mut Command) -> &'c mut Command {
    command
        .env("LONGSHORE_URL", server.url())
        .env("LONGSHORE_TOKEN", server.token())
        .env("NO_PROXY", "127.0.0.1")
}

fn test_python(python: &Environment, server: &Server, home: &Path) -> Result {
    step("validate document", python.program("openapi-spec-validator").arg(document()))?;
    let _ = fs::remove_dir_all(home);
    fs::create_dir_all(home)?;
    let package = home.join("longshore_client");
    step(
        "generate python client",
        python
            .program("openapi-python-client")
            .args(["generate", "--meta=none", "--fail-on-warning", "--path"])
            .arg(document())
            .arg("--output-path")
            .arg(&package)
            .arg("--config")
            .arg(folder().join("python/config.yml")),
    )?;
    fs::copy(folder().join("python/main.py"), home.join("main.py"))?;
    step(
        "check types of python client",
        python.program("mypy").args(["--strict", "longshore_client", "main.py"]).current_dir(home),
    )?;
    step("run python client", against(server, python.program("python").arg("main.py").current_dir(home)))
}

/// The TypeScript program with its npm packages, under `target`.
struct Node {
    packages: Packages,
}

impl Node {
    fn install() -> Result<Node> {
        let (source, home) = (folder().join("typescript"), target_dir().join("clients/typescript"));
        fs::create_dir_all(&home)?;
        for file in ["package.json", "package-lock.json", "tsconfig.json", "main.ts"] {
            fs::copy(source.join(file), home.join(file))?;
        }
        Ok(Node { packages: Packages::install("the generated client", &home)? })
    }

    fn test(&self, server: &Server) -> Result {
        let mut generate = self.packages.program("openapi-typescript");
        step("generate typescript types", generate.arg(document()).args(["--output", "schema.d.ts"]))?;
        step("check types of typescript client", &mut self.packages.program("tsc"))?;
        let mut run = Command::new("node");
        run.arg("out/main.js").current_dir(self.packages.folder());
        step("run typescript client", against(server, &mut run))
    }
}
