"""The views of the Django example.

python -m django runserver --settings django_shop.settings
"""

from __future__ import annotations

from django.db import connection, transaction
from django.http import HttpRequest, JsonResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt

from django_shop.jobs import confirm_order


@csrf_exempt
def create_order(request: HttpRequest, number: int) -> JsonResponse:
    """Stores an order and enqueues a job: both or neither. No `on_commit` is needed."""
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("insert into orders (number, confirmed) values (%s, false)", [number])
        handle = confirm_order.enqueue_in(connection, number=number)
    return JsonResponse({"job": handle.id}, status=201)


urlpatterns = [path("orders/<int:number>", create_order)]
