//! `send_email`: sends mail through the configured mail server. Without one, it writes
//! messages to an outbox folder, for machines that must not send mail and for trials.

use std::str::FromStr;
use std::time::Duration;

use lettre::message::Mailbox;
use lettre::message::header::ContentType;
use lettre::transport::smtp;
use lettre::{Address, AsyncSmtpTransport, AsyncTransport, Message, Tokio1Executor};
use serde::Deserialize;
use serde_json::{Value, json};

use super::folder::Folder;
use super::{Kind, Settings, unless_stopped};
use crate::error::{Error, Result};
use crate::job::JobId;
use crate::worker::{Context, Failure};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SendEmail {
    pub(super) to: String,
    pub(super) subject: String,
    pub(super) body: String,
}

impl Kind for SendEmail {
    const NAME: &'static str = "send_email";

    fn check(&self) -> Result<(), String> {
        let forbidden = |c: char| c.is_whitespace() || c.is_control();
        if self.to.contains(forbidden) || self.to.parse::<Address>().is_err() {
            return Err("to: not a mail address; write it like ada@example.com".into());
        }
        // A line break would end this header and start another one.
        if self.subject.contains(char::is_control) {
            return Err("subject: contains a line break or another control character; remove it".into());
        }
        Ok(())
    }

    fn schema() -> Value {
        json!({
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "send_email",
            "type": "object",
            "properties": {
                "to": {
                    "type": "string",
                    "pattern": "^[^\\s\\p{Cc}]+@[^\\s\\p{Cc}@]+$",
                    "description": "One mail address.",
                    "examples": ["ada@example.com"],
                },
                "subject": { "type": "string", "pattern": "^\\P{Cc}*$", "description": "One line." },
                "body": { "type": "string", "description": "Plain text." },
            },
            "required": ["to", "subject", "body"],
            "additionalProperties": false,
        })
    }
}

/// The limit for sending one message.
const TIMEOUT: Duration = Duration::from_secs(60);
/// How many characters of a server's reply are quoted.
const MAX_QUOTED_REPLY: usize = 200;

/// The sender of mail: `harbour@example.com` or `Harbour <harbour@example.com>`.
///
/// ```
/// let sender: longshore::builtin::Sender = "Harbour <harbour@example.com>".parse().unwrap();
/// assert!("harbour".parse::<longshore::builtin::Sender>().is_err());
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Sender(Mailbox);

impl FromStr for Sender {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.parse().map(Sender).map_err(|_| {
            format!(
                "`{text}` is not a sender address; write harbour@example.com or 'Harbour <harbour@example.com>'"
            )
        })
    }
}

/// Sends mail or writes it to the outbox.
pub(super) struct Mailer {
    from: Mailbox,
    transport: Transport,
}

enum Transport {
    Server(AsyncSmtpTransport<Tokio1Executor>),
    Outbox(Folder),
}

impl Mailer {
    pub(super) fn open(settings: &Settings) -> Result<Self> {
        let url = settings.smtp_url.as_ref().map(|url| url.expose()).filter(|url| !url.is_empty());
        let Some(url) = url else {
            let outbox = Folder::new("outbox", &settings.outbox)?;
            let folder = outbox.path().display();
            tracing::info!(
                "mail is written to {folder}, because `smtp_url` (--smtp-url, LONGSHORE_SMTP_URL) is not set"
            );
            let from = match &settings.mail_from {
                Some(Sender(from)) => from.clone(),
                None => default_sender()?,
            };
            return Ok(Mailer { from, transport: Transport::Outbox(outbox) });
        };
        // The message does not quote the URL, which contains a password.
        let server = AsyncSmtpTransport::<Tokio1Executor>::from_url(url).map_err(|_| {
            Error::invalid(
                "smtp_url",
                "smtp_url: not the URL of a mail server; write smtps://user:password@mail.example.com \
                 or smtp://user:password@mail.example.com:587?tls=required, and percent-encode special \
                 characters of the password",
            )
        })?;
        let Sender(from) = settings.mail_from.clone().ok_or_else(|| {
            Error::invalid(
                "mail_from",
                "mail_from: required with `smtp_url` (--smtp-url), because mail servers refuse mail without a sender; \
                 write it like harbour@example.com",
            )
        })?;
        if url.starts_with("smtp:") && !url.contains("tls=") {
            tracing::warn!(
                "smtp_url (--smtp-url): the connection to the mail server is not encrypted; use smtps:// or ?tls=required"
            );
        }
        Ok(Mailer { from, transport: Transport::Server(server.timeout(Some(TIMEOUT)).build()) })
    }

    fn compose(&self, mail: &SendEmail, message_id: &str) -> Result<Message, Failure> {
        let to: Address = mail.to.parse().map_err(Failure::permanent)?;
        Message::builder()
            .from(self.from.clone())
            .to(to.into())
            .subject(&mail.subject)
            .message_id(Some(message_id.to_owned()))
            .header(ContentType::TEXT_PLAIN)
            .body(mail.body.clone())
            .map_err(Failure::permanent)
    }

    /// The same for every attempt, so that a recipient can recognise a message that
    /// arrives twice.
    fn message_id(&self, job: JobId) -> String {
        format!("<{job}@{}>", self.from.email.domain())
    }
}

/// The sender of messages in the outbox, which are never sent.
fn default_sender() -> Result<Mailbox> {
    "longshore@localhost"
        .parse()
        .map_err(|error| Error::internal("the default sender is not an address").with_source(error))
}

pub(super) async fn send(mail: SendEmail, ctx: Context<Mailer>) -> Result<(), Failure> {
    mail.check().map_err(Failure::permanent)?;
    let mailer = ctx.state();
    let message_id = mailer.message_id(ctx.id());
    let message = mailer.compose(&mail, &message_id)?;
    let result = match &mailer.transport {
        Transport::Server(server) => {
            unless_stopped(&ctx, submit(server, message)).await?;
            json!({ "message_id": message_id })
        }
        Transport::Outbox(outbox) => {
            let path = outbox.write(&ctx, "eml", message.formatted()).await?;
            json!({ "message_id": message_id, "path": path })
        }
    };
    ctx.set_result(&result)?;
    Ok(())
}

async fn submit(server: &AsyncSmtpTransport<Tokio1Executor>, message: Message) -> Result<(), Failure> {
    match tokio::time::timeout(TIMEOUT, server.send(message)).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(smtp_failure(&error)),
        Err(_) => Err(Failure::retry(format!("the mail server took longer than {} s", TIMEOUT.as_secs()))),
    }
}

/// Permanent if the server rejects the message itself. A 5xx about our login is retried,
/// because the operator can correct the settings meanwhile.
fn smtp_failure(error: &smtp::Error) -> Failure {
    let reply: String = error.to_string().chars().take(MAX_QUOTED_REPLY).collect();
    match error.status().map(u16::from) {
        Some(530 | 534 | 535 | 538) => Failure::retry(format!(
            "the mail server refused the login: {reply}; check `smtp_url` (--smtp-url)"
        )),
        _ if error.is_permanent() => {
            Failure::permanent(format!("the mail server rejected the message: {reply}"))
        }
        _ => Failure::retry(format!("the message could not be sent to the mail server: {reply}")),
    }
}

#[cfg(all(test, feature = "sqlite"))]
mod tests {
    use super::*;
    use crate::builtin::Secret;
    use crate::builtin::testing::{MailServer, TempFolder, run, run_without_backoff};
    use crate::{JobRecord, Status};

    fn payload(to: &str) -> Value {
        json!({ "to": to, "subject": "Sch\u{f6}ne Gr\u{fc}\u{df}e", "body": "first line\n.\n\u{26f5} last line" })
    }

    fn settings(url: &str) -> Settings {
        Settings {
            smtp_url: Some(Secret::new(url)),
            mail_from: Some("Harbour <harbour@example.com>".parse().unwrap()),
            ..Settings::default()
        }
    }

    fn result(job: &JobRecord) -> Value {
        serde_json::from_str(job.result.as_ref().unwrap().get()).unwrap()
    }

    #[tokio::test]
    async fn without_a_server_the_message_is_written_to_a_file() {
        let temp = TempFolder::new();
        let settings = Settings { outbox: temp.path().join("outbox"), ..Settings::default() };
        let job = run(&settings, "send_email", &payload("ada@example.com")).await;
        assert_eq!(job.status, Status::Succeeded, "{:?}", job.last_error);
        let path = settings.outbox.join(format!("{}.eml", job.id));
        let message_id = format!("<{}@localhost>", job.id);
        assert_eq!(result(&job), json!({ "message_id": message_id, "path": path }));
        let message = std::fs::read_to_string(path).unwrap();
        for line in [
            "To: ada@example.com",
            "From: longshore@localhost",
            &format!("Message-ID: {message_id}"),
            "Date: ",
        ] {
            assert!(message.contains(line), "{line}: {message}");
        }
        assert_eq!(std::fs::read_dir(&settings.outbox).unwrap().count(), 1, "no partial file is left");
    }

    #[tokio::test]
    async fn a_server_receives_the_message_unchanged() {
        let mut server = MailServer::start(&[]);
        let job = run(&settings(&server.url("")), "send_email", &payload("ada@example.com")).await;
        assert_eq!(job.status, Status::Succeeded, "{:?}", job.last_error);
        let message_id = format!("<{}@example.com>", job.id);
        assert_eq!(result(&job), json!({ "message_id": message_id }));
        let expected = json!({
            "from": "harbour@example.com",
            "to": ["ada@example.com"],
            "header_from": "Harbour <harbour@example.com>",
            "subject": "Sch\u{f6}ne Gr\u{fc}\u{df}e",
            "message_id": message_id,
            "body": "first line\n.\n\u{26f5} last line",
        });
        assert_eq!(server.next_message(), expected);
    }

    #[tokio::test]
    async fn a_permanent_rejection_fails_the_job_permanently() {
        let server = MailServer::start(&[]);
        let job =
            run_without_backoff(&settings(&server.url("")), "send_email", &payload("refused@example.com"))
                .await;
        assert_eq!((job.status, job.attempts), (Status::FailedPermanent, 1));
        let error = job.last_error.unwrap();
        assert!(
            error.starts_with("the mail server rejected the message: ") && error.contains("no such mailbox"),
            "{error}"
        );
        assert!(!error.contains("last line"), "{error}");
    }

    #[tokio::test]
    async fn after_a_temporary_error_the_message_is_sent_again_with_the_same_id() {
        let mut server = MailServer::start(&[]);
        let job =
            run_without_backoff(&settings(&server.url("")), "send_email", &payload("busy@example.com")).await;
        assert_eq!((job.status, job.attempts), (Status::Succeeded, 2), "{:?}", job.last_error);
        assert!(job.errors[0].error.as_ref().unwrap().contains("try later"), "{:?}", job.errors);
        assert_eq!(server.next_message()["message_id"], format!("<{}@example.com>", job.id));
    }

    #[tokio::test]
    async fn an_unreachable_server_is_retried() {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let url = format!("smtp://ada:s3cret@127.0.0.1:{port}");
        let job = run_without_backoff(&settings(&url), "send_email", &payload("ada@example.com")).await;
        assert_eq!((job.status, job.attempts), (Status::FailedPermanent, 3), "all attempts are used up");
        let error = job.last_error.unwrap();
        assert!(error.starts_with("the message could not be sent to the mail server: "), "{error}");
        assert!(!error.contains("s3cret"), "{error}");
    }

    #[tokio::test]
    async fn a_password_logs_in_and_a_wrong_password_is_retried() {
        let mut server = MailServer::start(&["--password", "s3cret"]);
        let job = run(&settings(&server.url("ada:s3cret@")), "send_email", &payload("ada@example.com")).await;
        assert_eq!(job.status, Status::Succeeded, "{:?}", job.last_error);
        assert_eq!(server.next_message()["to"], json!(["ada@example.com"]));
        let job = run(&settings(&server.url("ada:wr0ng@")), "send_email", &payload("ada@example.com")).await;
        assert_eq!(job.status, Status::Retrying);
        let error = job.last_error.unwrap();
        assert!(
            error.starts_with("the mail server refused the login: ") && error.contains("--smtp-url"),
            "{error}"
        );
        assert!(!error.contains("wr0ng"), "{error}");
    }

    #[test]
    fn errors_in_settings_name_the_flag_and_show_no_password() {
        for url in ["mail.example.com", "http://ada:s3cret@mail", "smtp://", "smtp://a?tls=s3cret"] {
            let error = Mailer::open(&settings(url)).err().unwrap().to_string();
            assert!(error.starts_with("smtp_url: "), "{error}");
            assert!(!error.contains("s3cret"), "{error}");
        }
        let without_sender = Settings { mail_from: None, ..settings("smtps://mail.example.com") };
        assert!(Mailer::open(&without_sender).err().unwrap().to_string().starts_with("mail_from: "));
    }
}
