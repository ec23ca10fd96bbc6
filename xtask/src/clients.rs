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
    python::Environment,
    run::{Result, cargo, step, succeeds, target_dir, took, workspace},
    schemathesis::server::{Server, TestDatabase},
};

/// `cargo xtask clients`. Fails if a generator cannot be installed.
pub(crate) fn clients() -> Result {
    let (python, node) = (python()?, Node::install()?);
    test(Some(&python), Some(&node))
}

/// As [`clients`], for `cargo xtask test`. A generator that cannot be installed is skipped
/// with a message.
pub(crate) fn quick() -> Result {
    let skipped = |language: &str, reason: Box<dyn std::error::Error>| {
        eprintln!("==> {language} client: SKIPPED, {reason}");
    };
    let python = python().map_err(|reason| skipped("python", reason)).ok();
    let node = Node::install().map_err(|reason| skipped("typescript", reason)).ok();
    if python.is_none() && node.is_none() {
        return Ok(());
    }
    test(python.as_ref(), node.as_ref())
}

fn test(python: Option<&Environment>, node: Option<&Node>) -> Result {
    // The same features as for the tests, so that cargo does not build everything twice.
    let build = ["build", "--workspace", "--all-features", "--bin", "longshore"];
    step("build server", &mut cargo(build))?;
    let home = target_dir().join("clients");
    fs::create_dir_all(&home)?;
    let _ = fs::remove_file(home.join("queue.db"));
    let started = Instant::now();
    let server = Server::start(TestDatabase::file(&home), &home)?;
    if let Some(python) = python {
        test_python(python, &server, &home.join("python"))?;
    }
    if let Some(node) = node {
        node.test(&server)?;
    }
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

fn python() -> Result<Environment> {
    Environment::with("clients", &folder().join("python/requirements.txt"))
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

/// The npm packages of the TypeScript program, installed under `target`.
struct Node {
    home: PathBuf,
}

impl Node {
    /// Installs the packages again if the versions differ from those installed before.
    fn install() -> Result<Node> {
        let (source, home) = (folder().join("typescript"), target_dir().join("clients/typescript"));
        let wanted = fs::read_to_string(source.join("package-lock.json"))?;
        fs::create_dir_all(&home)?;
        for file in ["package.json", "package-lock.json", "tsconfig.json", "main.ts"] {
            fs::copy(source.join(file), home.join(file))?;
        }
        // Written last, so that an interrupted installation starts again.
        let marker = home.join("installed.json");
        let node = Node { home };
        if fs::read_to_string(&marker).is_ok_and(|installed| installed == wanted) {
            return Ok(node);
        }
        if !succeeds(Command::new("node").arg("--version")) {
            return Err(
                "node is missing; install Node.js 20 or later (Debian: apt-get install nodejs npm)".into()
            );
        }
        eprintln!("==> npm: installing openapi-typescript under {}", node.home.display());
        let mut install = Command::new("npm");
        install
            .args(["ci", "--silent", "--no-audit", "--no-fund", "--ignore-scripts"])
            .current_dir(&node.home);
        if !succeeds(&mut install) {
            return Err("`npm ci` failed; install npm, and check that its registry can be reached".into());
        }
        fs::write(marker, wanted)?;
        Ok(node)
    }

    fn program(&self, name: &str) -> Command {
        let mut program = Command::new(self.home.join("node_modules/.bin").join(name));
        program.current_dir(&self.home);
        program
    }

    fn test(&self, server: &Server) -> Result {
        let mut generate = self.program("openapi-typescript");
        step("generate typescript types", generate.arg(document()).args(["--output", "schema.d.ts"]))?;
        step("check types of typescript client", &mut self.program("tsc"))?;
        let mut run = Command::new("node");
        run.arg("out/main.js").current_dir(&self.home);
        step("run typescript client", against(server, &mut run))
    }
}
