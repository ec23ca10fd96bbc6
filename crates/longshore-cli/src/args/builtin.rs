//! What the built-in kinds can be told, for every command that runs them.

use std::path::PathBuf;

use clap::Args;
use lettre::message::Mailbox;

use crate::builtin::{Allowed, Settings};
use crate::secret::Secret;

#[derive(Debug, Args)]
#[command(next_help_heading = "Built-in kinds")]
pub(crate) struct Builtin {
    /// send_email: the mail server, like smtps://user:password@mail.example.com; without one, mail
    /// is written to --outbox
    ///
    /// smtps:// speaks TLS from the start (port 465). smtp://host:587?tls=required changes to TLS
    /// first; smtp://host alone never does. Better given by the variable: other users of the machine
    /// can read a command line.
    #[arg(long, value_name = "URL", value_parser = Secret::read, env = "LONGSHORE_SMTP_URL",
          hide_env_values = true)]
    smtp_url: Option<Secret>,

    /// send_email: who it is from, like 'Harbour <harbour@example.com>'; needed with --smtp-url
    #[arg(long, value_name = "ADDRESS", value_parser = mailbox, env = "LONGSHORE_MAIL_FROM")]
    mail_from: Option<Mailbox>,

    /// send_email: without --smtp-url, the folder where messages become .eml files
    #[arg(long, value_name = "FOLDER", default_value = "outbox", env = "LONGSHORE_OUTBOX")]
    outbox: PathBuf,

    /// resize_image: the one folder that file:// may read from; without it, file:// is refused
    #[arg(long, value_name = "FOLDER", env = "LONGSHORE_IMAGE_ROOT")]
    image_root: Option<PathBuf>,

    /// resize_image: the folder where pictures are written, as <job id>.png
    #[arg(long, value_name = "FOLDER", default_value = "images", env = "LONGSHORE_IMAGE_OUTPUT")]
    image_output: PathBuf,

    /// webhook_delivery: what to sign with, whsec_ and base64; two, with a comma, while changing them
    ///
    /// As Standard Webhooks has it: one signature for each secret, so receivers may know the old one
    /// or the new one. Without a secret, webhooks go unsigned. Better given by the variable: other
    /// users of the machine can read a command line.
    #[arg(long = "webhook-secret", value_name = "WHSEC,…", value_delimiter = ',', value_parser = Secret::read,
          env = "LONGSHORE_WEBHOOK_SECRETS", hide_env_values = true)]
    webhook_secrets: Vec<Secret>,

    /// webhook_delivery, resize_image: call http:// as well; otherwise only https://
    #[arg(long, env = "LONGSHORE_ALLOW_HTTP", value_parser = clap::builder::FalseyValueParser::new())]
    allow_http: bool,

    /// webhook_delivery, resize_image: inner addresses that may be called, like 10.0.0.0/8,hooks.internal
    ///
    /// Whoever can enqueue chooses the URL. So addresses of this machine and of private networks
    /// (127.0.0.1, 10.0.0.0/8, 169.254.169.254 and the like) are refused, by whatever name, unless
    /// listed here: as an address, a network, or a host name, which is then trusted wherever it leads.
    #[arg(long, value_name = "CIDR|HOST,…", value_delimiter = ',', env = "LONGSHORE_ALLOW_OUTBOUND")]
    allow_outbound: Vec<Allowed>,
}

impl Builtin {
    pub(crate) fn settings(&self) -> Settings {
        Settings {
            smtp_url: self.smtp_url.clone(),
            mail_from: self.mail_from.clone(),
            outbox: self.outbox.clone(),
            image_root: self.image_root.clone(),
            image_output: self.image_output.clone(),
            webhook_secrets: self.webhook_secrets.clone(),
            allow_http: self.allow_http,
            allow_outbound: self.allow_outbound.clone(),
        }
    }
}

fn mailbox(text: &str) -> Result<Mailbox, String> {
    text.parse().map_err(|_| {
        format!("`{text}` is not a sender; write harbour@example.com or 'Harbour <harbour@example.com>'")
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use clap::{CommandFactory, Parser};

    use crate::args::{Cli, Command};

    use super::*;

    fn parse(words: &[&str]) -> Result<Settings, String> {
        let words = ["longshore", "worker"].iter().chain(words);
        match Cli::try_parse_from(words).map_err(|error| error.to_string())?.command {
            Command::Worker(worker) => Ok(worker.work.builtin.settings()),
            _ => unreachable!(),
        }
    }

    #[test]
    fn the_defaults_are_the_settings_own() {
        assert_eq!(format!("{:?}", parse(&[]).unwrap()), format!("{:?}", Settings::default()));
    }

    #[test]
    fn every_flag_reaches_its_setting() {
        let settings = parse(&[
            "--smtp-url",
            "smtps://mail.example.com",
            "--mail-from",
            "Harbour <harbour@example.com>",
            "--outbox",
            "a",
            "--image-root",
            "b",
            "--image-output",
            "c",
            "--webhook-secret",
            "whsec_one,whsec_two",
            "--allow-http",
            "--allow-outbound",
            "10.0.0.0/8,hooks.internal",
        ])
        .unwrap();
        let expected = Settings {
            smtp_url: Some(Secret::read("smtps://mail.example.com").unwrap()),
            mail_from: Some("Harbour <harbour@example.com>".parse().unwrap()),
            outbox: "a".into(),
            image_root: Some("b".into()),
            image_output: "c".into(),
            webhook_secrets: ["whsec_one", "whsec_two"].map(|text| Secret::read(text).unwrap()).into(),
            allow_http: true,
            allow_outbound: ["10.0.0.0/8", "hooks.internal"].map(|text| text.parse().unwrap()).into(),
        };
        assert_eq!(settings, expected);
    }

    #[test]
    fn refusals_name_the_flag_and_the_remedy() {
        for (flag, value, remedy) in [
            ("--mail-from", "harbour", "harbour@example.com"),
            ("--allow-outbound", "10.0.0.0/33", "10.0.0.0/8"),
            ("--allow-outbound", "https://a", "hooks.internal"),
        ] {
            let refused = parse(&[flag, value]).unwrap_err();
            assert!(refused.contains(flag) && refused.contains(remedy), "{refused}");
        }
    }

    #[test]
    fn no_secret_is_shown() {
        let settings =
            parse(&["--smtp-url", "smtps://ada:s3cret@mail", "--webhook-secret", "whsec_s3cret"]).unwrap();
        assert!(!format!("{settings:?}").contains("s3cret"), "{settings:?}");
        let command = Cli::command();
        let worker = command.find_subcommand("worker").unwrap();
        for secret in ["smtp_url", "webhook_secrets"] {
            let argument = worker.get_arguments().find(|arg| arg.get_id() == secret).unwrap();
            assert!(argument.is_hide_env_values_set(), "{secret}");
        }
    }
}
