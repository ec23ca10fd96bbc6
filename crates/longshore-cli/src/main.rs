//! The `longshore` command. The code is in the library of this package.

fn main() -> std::process::ExitCode {
    longshore_cli::main()
}
