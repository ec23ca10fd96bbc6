//! The server that is asked: `longshore serve` on a database of its own, with an
//! admin's token. It goes when it is dropped.

use std::{
    env,
    fs::File,
    io::{self, BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, Stdio},
};

use crate::{
    postgres::random_hex,
    run::{Result, succeeds, target_dir},
    test::OpenDatabase,
};

/// Where the server keeps its jobs.
pub(super) enum TestDatabase {
    File(PathBuf),
    /// Beside whatever else is in the database, which may be ours and go as a whole.
    Schema {
        url: String,
        name: String,
        ours: bool,
    },
}

impl TestDatabase {
    pub(super) fn file(folder: &Path) -> TestDatabase {
        TestDatabase::File(folder.join("queue.db"))
    }

    pub(super) fn schema(database: &OpenDatabase) -> Result<TestDatabase> {
        let name = format!("schemathesis_{}", random_hex(4)?);
        let ours = matches!(database, OpenDatabase::Private(_));
        Ok(TestDatabase::Schema { url: database.url().to_owned(), name, ours })
    }

    fn url(&self) -> String {
        match self {
            TestDatabase::File(file) => format!("sqlite:{}", file.display()),
            TestDatabase::Schema { url, name, .. } => {
                let joint = if url.contains('?') { '&' } else { '?' };
                format!("{url}{joint}schema={name}")
            }
        }
    }

    /// Removes what would stay in a database that is not ours.
    fn clear(&self) {
        let TestDatabase::Schema { url, name, ours: false } = self else { return };
        let drop = format!("drop schema {name} cascade");
        if !succeeds(Command::new("psql").arg(url).args(["--quiet", "--command", &drop])) {
            eprintln!("    schemathesis: the schema `{name}` stays in the database; psql could not drop it");
        }
    }
}

pub(super) struct Server {
    child: Child,
    /// Kept open: a server that cannot print might stumble over it.
    printed: Option<BufReader<ChildStdout>>,
    database: TestDatabase,
    url: String,
    token: String,
    log: PathBuf,
}

impl Server {
    pub(super) fn start(database: TestDatabase, home: &Path) -> Result<Server> {
        told(&mut longshore(&database, &["migrate"]))?;
        let made = told(&mut longshore(
            &database,
            &["tokens", "create", "schemathesis", "--scope", "admin", "--json"],
        ))?;
        let token = text(&made, "token").ok_or("`longshore tokens create` printed no token")?;
        let log = home.join("server.log");
        let mut serve =
            longshore(&database, &["serve", "--bind", "127.0.0.1:0", "--auth", "tokens", "--json"]);
        serve.args(["--allow-unknown-kinds", "--log", "warn"]);
        let mut child = serve
            .stdout(Stdio::piped())
            .stderr(File::create(&log)?)
            .spawn()
            .map_err(|error| format!("longshore serve: {error}"))?;
        let printed = child.stdout.take().map(BufReader::new);
        let mut server = Server { child, printed, database, url: String::new(), token, log };
        let greeting = server.printed.as_mut().map(first_object).unwrap_or_default();
        server.url =
            text(&greeting, "url").ok_or_else(|| format!("the server did not start:\n{}", server.words()))?;
        Ok(server)
    }

    pub(super) fn engine(&self) -> &'static str {
        match self.database {
            TestDatabase::File(_) => "sqlite",
            TestDatabase::Schema { .. } => "postgres",
        }
    }

    pub(super) fn url(&self) -> &str {
        &self.url
    }

    pub(super) fn token(&self) -> &str {
        &self.token
    }

    fn words(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Ends it as an operator would, and tells whether it was well to the end.
    pub(super) fn stop(mut self) -> Result {
        succeeds(Command::new("kill").args(["-s", "TERM", &self.child.id().to_string()]));
        let status = self.child.wait()?;
        let words = self.words();
        if !status.success() || words.contains("panicked") {
            return Err(format!("the server ended badly ({status}):\n{words}").into());
        }
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.database.clear();
    }
}

/// The command that was built, without what the shell around us says to it.
fn longshore(database: &TestDatabase, args: &[&str]) -> Command {
    let mut command = Command::new(target_dir().join("debug/longshore"));
    for (name, _) in env::vars_os() {
        let name = name.to_string_lossy();
        if ["LONGSHORE_", "API_", "WORKER_", "RUST_LOG"].iter().any(|prefix| name.starts_with(prefix)) {
            command.env_remove(name.as_ref());
        }
    }
    command.args(args).env("DATABASE_URL", database.url()).stdin(Stdio::null());
    command
}

/// What a command prints, if it succeeds.
fn told(command: &mut Command) -> Result<String> {
    let done = command.output().map_err(|error| format!("longshore: {error}"))?;
    if !done.status.success() {
        return Err(String::from_utf8_lossy(&done.stderr).into_owned().into());
    }
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

/// Lines up to the one that ends an object.
fn first_object(lines: impl BufRead) -> String {
    let mut object = String::new();
    for line in lines.lines().map_while(io::Result::ok) {
        object += &line;
        if line == "}" {
            break;
        }
    }
    object
}

/// A text of a JSON object that needs no escapes.
fn text(json: &str, name: &str) -> Option<String> {
    let rest = json.split_once(&format!("\"{name}\":"))?.1.trim_start().strip_prefix('"')?;
    Some(rest.split_once('"')?.0.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_read_from_what_a_command_prints() {
        let printed = "{\n  \"id\": \"7\",\n  \"token\": \"longshore_abc\"\n}";
        assert_eq!(text(printed, "token").as_deref(), Some("longshore_abc"));
        assert_eq!(text(printed, "secret"), None);
    }

    #[test]
    fn a_schema_is_named_in_the_url() {
        let database = |url: &str| TestDatabase::Schema { url: url.into(), name: "s".into(), ours: true };
        assert_eq!(database("postgres://a/b").url(), "postgres://a/b?schema=s");
        assert_eq!(database("postgres://a/b?c=d").url(), "postgres://a/b?c=d&schema=s");
    }
}
