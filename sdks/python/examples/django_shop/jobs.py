"""The jobs of the Django example.

export DJANGO_SETTINGS_MODULE=django_shop.settings DATABASE_URL=postgres://localhost/app
longshore-worker django_shop.jobs:ls           # in the folder examples
"""

from __future__ import annotations

import django
from django.apps import apps
from django.db import close_old_connections, connection

from longshore import Longshore

if not apps.ready:  # the worker imports this module without manage.py
    django.setup()

ls = Longshore()


@ls.job(queue="mail", max_attempts=5)
def confirm_order(number: int) -> str:
    """Sync handlers run on threads, so the ORM works as in a view."""
    close_old_connections()
    with connection.cursor() as cursor:
        cursor.execute("update orders set confirmed = true where number = %s", [number])
    return f"confirmed {number}"
