"""The settings of the Django example."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

SECRET_KEY = "only for the example"  # a real project reads it from the environment
DEBUG = True
ALLOWED_HOSTS = ["*"]
ROOT_URLCONF = "django_shop.urls"
INSTALLED_APPS: list[str] = []
_url = urlsplit(os.environ.get("DATABASE_URL", "postgres://localhost/app"))
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": _url.path[1:],
        "USER": _url.username or "",
        "PASSWORD": _url.password or "",
        "HOST": _url.hostname or "",
        "PORT": _url.port or "",
    }
}
