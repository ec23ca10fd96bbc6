//! The server that suites test: how it is built, and `longshore serve` on its own database with an
//! admin token. Dropping it stops the server.

use std::{
    env,
    fs::File,
    io::{self, BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, Stdio},
};

use crate::{
    postgres::random_hex,
    run::{Result, cargo, step, succeeds, target_dir},
    test::OpenDatabase,
};

/// The variable that names a server binary. Suites that have it build nothing, so they do not wait
/// for another cargo.
pub(crate) const BINARY_VARIABLE: &str = "LONGSHORE_BIN";

/// The built server, or the one that the environment names.
pub(crate) fn binary() -> PathBuf {
    let given = env::var_os(BINARY_VARIABLE).filter(|path| !path.is_empty());
    given.map_or_else(built, PathBuf::from)
}

/// The server that [`build_command`] builds.
pub(crate) fn built() -> PathBuf {
    target_dir().join("debug/longshore")
}

/// Builds the server, unless the environment names one.
pub(crate) fn build() -> Result {
    if env::var_os(BINARY_VARIABLE).is_some_and(|path| !path.is_empty()) {
        return Ok(());
    }
    step("build server", &mut build_command())
}

/// Selects a test as well, because cargo then enables the features of the development
/// dependencies. The library and most dependencies would otherwise be built a second time for the
/// tests.
pub(crate) fn build_command() -> Command {
    cargo(["build", "--workspace", "--all-features", "--bin", "longshore", "--test", "otel"])
}

/// A database engine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Engine {
    Sqlite,
    Postgres,
}

impl Engine {
    pub(crate) const BOTH: [Engine; 2] = [Engine::Sqlite, Engine::Postgres];

    /// The engines that the value of an argument names.
    pub(crate) fn parse(name: &str) -> Result<Vec<Engine>, String> {
        match name {
            "sqlite" => Ok(vec![Engine::Sqlite]),
            "postgres" => Ok(vec![Engine::Postgres]),
            "both" => Ok(Engine::BOTH.to_vec()),
            other => Err(format!("unknown engine `{other}`; use sqlite, postgres or both")),
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Engine::Sqlite => "sqlite",
            Engine::Postgres => "postgres",
        }
    }
}

/// The database of the server.
pub(crate) enum TestDatabase {
    File(PathBuf),
    /// A separate schema, because the database may contain other data.
    Schema {
        url: String,
        name: String,
        /// Whether the whole database is removed after the run.
        is_temporary: bool,
    },
}

impl TestDatabase {
    pub(crate) fn file(folder: &Path) -> TestDatabase {
        TestDatabase::File(folder.join("queue.db"))
    }

    pub(crate) fn schema(database: &OpenDatabase) -> Result<TestDatabase> {
        let name = format!("xtask_{}", random_hex(4)?);
        let is_temporary = matches!(database, OpenDatabase::Private(_));
        Ok(TestDatabase::Schema { url: database.url().to_owned(), name, is_temporary })
    }

    fn url(&self) -> String {
        match self {
            TestDatabase::File(file) => format!("sqlite:{}", file.display()),
            TestDatabase::Schema { url, name, .. } => {
                let separator = if url.contains('?') { '&' } else { '?' };
                // The database may have fsync off.
                format!("{url}{separator}schema={name}&durability=relaxed")
            }
        }
    }

    /// Drops the schema, unless the whole database is temporary.
    fn clear(&self) {
        let TestDatabase::Schema { url, name, is_temporary: false } = self else { return };
        let drop = format!("drop schema {name} cascade");
        if !succeeds(Command::new("psql").arg(url).args(["--quiet", "--command", &drop])) {
            eprintln!("    psql could not drop the schema `{name}`; drop it manually");
        }
    }
}

pub(crate) struct Server {
    child: Child,
    /// Kept open, because the server may fail if its output is closed.
    stdout: Option<BufReader<ChildStdout>>,
    database: TestDatabase,
    url: String,
    token: String,
    log: PathBuf,
}

impl Server {
    pub(crate) fn start(database: TestDatabase, home: &Path) -> Result<Server> {
        Server::start_with(database, home, &[])
    }

    /// As [`Server::start`], with more arguments for `longshore serve`.
    pub(crate) fn start_with(database: TestDatabase, home: &Path, args: &[&str]) -> Result<Server> {
        stdout_of(&mut longshore(&database, &["migrate"]))?;
        let token = create_token(&database, "xtask", "admin")?;
        let log = home.join("server.log");
        let mut serve =
            longshore(&database, &["serve", "--bind", "127.0.0.1:0", "--auth", "tokens", "--json"]);
        serve.args(["--allow-unknown-kinds", "--log", "warn"]).args(args);
        let mut child = serve
            .stdout(Stdio::piped())
            .stderr(File::create(&log)?)
            .spawn()
            .map_err(|error| format!("longshore serve: {error}"))?;
        let stdout = child.stdout.take().map(BufReader::new);
        let mut server = Server { child, stdout, database, url: String::new(), token, log };
        let greeting = server.stdout.as_mut().map(first_object).unwrap_or_default();
        server.url = string_field(&greeting, "url")
            .ok_or_else(|| format!("the server did not start:\n{}", server.log_text()))?;
        Ok(server)
    }

    pub(crate) fn engine(&self) -> Engine {
        match self.database {
            TestDatabase::File(_) => Engine::Sqlite,
            TestDatabase::Schema { .. } => Engine::Postgres,
        }
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    pub(crate) fn token(&self) -> &str {
        &self.token
    }

    /// Creates another token and returns its secret.
    pub(crate) fn create_token(&self, name: &str, scope: &str) -> Result<String> {
        create_token(&self.database, name, scope)
    }

    /// A command that runs a file of SQL statements on the schema of the server.
    pub(crate) fn psql(&self, file: &Path) -> Result<Command> {
        let TestDatabase::Schema { url, name, .. } = &self.database else {
            return Err("psql needs a Postgres database".into());
        };
        let mut psql = Command::new("psql");
        psql.args(["--quiet", "--no-psqlrc", "--set=ON_ERROR_STOP=1"])
            .arg(format!("--set=schema={name}"))
            .arg("--file")
            .arg(file)
            .arg(url);
        Ok(psql)
    }

    pub(crate) fn log(&self) -> &Path {
        &self.log
    }

    fn log_text(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Stops the server with SIGTERM, as an operator would. Fails if it exits with an
    /// error or has panicked.
    pub(crate) fn stop(mut self) -> Result {
        succeeds(Command::new("kill").args(["-s", "TERM", &self.child.id().to_string()]));
        let status = self.child.wait()?;
        let log = self.log_text();
        if !status.success() || log.contains("panicked") {
            let lines: Vec<&str> = log.lines().filter(|line| !line.contains("job failed")).collect();
            let last = lines[lines.len().saturating_sub(20)..].join("\n");
            return Err(format!(
                "the server failed or panicked ({status}); the end of {}:\n{last}",
                self.log.display()
            )
            .into());
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

fn create_token(database: &TestDatabase, name: &str, scope: &str) -> Result<String> {
    let created =
        stdout_of(&mut longshore(database, &["tokens", "create", name, "--scope", scope, "--json"]))?;
    string_field(&created, "token").ok_or_else(|| "`longshore tokens create` printed no token".into())
}

/// The built `longshore` command, without the settings in this program's environment.
fn longshore(database: &TestDatabase, args: &[&str]) -> Command {
    let mut command = Command::new(binary());
    for (name, _) in env::vars_os() {
        let name = name.to_string_lossy();
        if ["LONGSHORE_", "API_", "WORKER_", "RUST_LOG"].iter().any(|prefix| name.starts_with(prefix)) {
            command.env_remove(name.as_ref());
        }
    }
    command.args(args).env("DATABASE_URL", database.url()).stdin(Stdio::null());
    command
}

/// The standard output of a command, if it succeeds.
fn stdout_of(command: &mut Command) -> Result<String> {
    let output = command.output().map_err(|error| format!("longshore: {error}"))?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned().into());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The lines up to the end of the first JSON object.
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

/// The value of a string field of a JSON object, if the value needs no escapes.
fn string_field(json: &str, name: &str) -> Option<String> {
    let rest = json.split_once(&format!("\"{name}\":"))?.1.trim_start().strip_prefix('"')?;
    Some(rest.split_once('"')?.0.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_string_field_is_read_from_printed_json() {
        let printed = "{\n  \"id\": \"7\",\n  \"token\": \"longshore_abc\"\n}";
        assert_eq!(string_field(printed, "token").as_deref(), Some("longshore_abc"));
        assert_eq!(string_field(printed, "secret"), None);
    }

    #[test]
    fn the_url_names_the_schema() {
        let database =
            |url: &str| TestDatabase::Schema { url: url.into(), name: "s".into(), is_temporary: true };
        assert_eq!(database("postgres://a/b").url(), "postgres://a/b?schema=s&durability=relaxed");
        assert_eq!(database("postgres://a/b?c=d").url(), "postgres://a/b?c=d&schema=s&durability=relaxed");
    }
}
