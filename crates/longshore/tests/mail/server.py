"""A mail server for tests. It prints its port, and then one line of JSON for each
message it accepts, as decoded by Python's mail parser.

It rejects refused@… permanently, and busy@… the first time only. With --password it
requires a login; with --tls and the files of a certificate and its key it uses TLS.
"""

import argparse
import base64
import email
import email.policy
import json
import socketserver
import ssl
import threading

flags = argparse.ArgumentParser()
flags.add_argument("--password")
flags.add_argument("--tls", nargs=2)
flags = flags.parse_args()
PASSWORD = flags.password
DEFERRED = set()
STDOUT = threading.Lock()


def write_line(line):
    with STDOUT:
        print(line, flush=True)


class Session(socketserver.StreamRequestHandler):
    def reply(self, text):
        self.wfile.write(text.encode() + b"\r\n")

    def handle(self):
        self.reply("220 test mail server")
        logged_in, sender, recipients = PASSWORD is None, None, []
        for line in self.rfile:
            command = line.decode().rstrip("\r\n")
            verb = command.split(":")[0].split(" ")[0].upper()
            if verb == "EHLO":
                self.wfile.write(b"250-test\r\n")
                if PASSWORD is not None:
                    self.wfile.write(b"250-AUTH PLAIN\r\n")
                self.reply("250 8BITMIME")
            elif verb == "AUTH":
                given = base64.b64decode(command.split(" ")[2]).split(b"\0")[2].decode()
                logged_in = given == PASSWORD
                self.reply("235 welcome" if logged_in else "535 5.7.8 wrong password")
            elif verb == "QUIT":
                self.reply("221 bye")
                return
            elif not logged_in:
                self.reply("530 5.7.0 authentication required")
            elif verb == "MAIL":
                sender = command.split("<")[1].split(">")[0]
                self.reply("250 ok")
            elif verb == "RCPT":
                recipient = command.split("<")[1].split(">")[0]
                if recipient.startswith("refused@"):
                    self.reply("550 5.1.1 no such mailbox")
                elif recipient.startswith("busy@") and recipient not in DEFERRED:
                    DEFERRED.add(recipient)
                    self.reply("451 4.3.0 try later")
                else:
                    recipients.append(recipient)
                    self.reply("250 ok")
            elif verb == "DATA":
                self.reply("354 send the message")
                self.accept_message(sender, recipients)
                self.reply("250 accepted")
            else:
                self.reply("250 ok")

    def accept_message(self, sender, recipients):
        lines = []
        for line in self.rfile:
            if line == b".\r\n":
                break
            lines.append(line[1:] if line.startswith(b".") else line)
        message = email.message_from_bytes(b"".join(lines), policy=email.policy.default)
        body = message.get_content().replace("\r\n", "\n").rstrip("\n")
        write_line(json.dumps({
            "from": sender,
            "to": recipients,
            "header_from": message["From"],
            "subject": message["Subject"],
            "message_id": message["Message-ID"],
            "body": body,
        }))


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True


server = Server(("127.0.0.1", 0), Session)
if flags.tls:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*flags.tls)
    # No handshake during accept: a client that closes the connection must not end the
    # server.
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
write_line(server.server_address[1])
server.serve_forever()
